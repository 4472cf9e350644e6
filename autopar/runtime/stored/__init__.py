"""What a planned model stores: its parameters in place of the user's, and that these stay what was planned."""
