"""Questions of a forward about the contents of its tensors: answered where known, else handled or refused."""
