"""Questions of a forward about the contents of its tensors: answered where these are known, handled or refused
elsewhere."""
