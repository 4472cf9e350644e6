"""Checks of what users give besides a model: arguments, files, name patterns and environment variables."""
