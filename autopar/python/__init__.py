"""What is done about Python while a model's own code runs: functions replaced, tensors in plain attributes."""
