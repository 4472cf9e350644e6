"""Values for parameters: made, read from files, or handed over by the user; and written to files."""
