"""What a forward asks of the contents of its tensors: answers where they are known, and what to do else."""
