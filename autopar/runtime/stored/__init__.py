"""What a planned model stores in place of the user's parameters, and checks that the model stays as planned."""
