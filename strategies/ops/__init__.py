"""The table of rules, a file for each family of ops.

Each file has a dict `RULES`: names of ops, separated by blanks, to the rule's text, or to a function that writes the
text for a node, where the arguments decide (None: no rule holds for these arguments). A name stands for the op in
all its forms: `torch.tanh`, `Tensor.tanh`, `Tensor.tanh_`, and where its rule is a text `torch.ops.aten.tanh.default`.
Functions that write rules of ATen's operators, whose arguments have an order of their own, are in a dict `OPERATORS`.
"""
