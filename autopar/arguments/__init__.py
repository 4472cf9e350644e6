"""What users give beside a model: arguments, files, names and variables of the environment, checked."""
