"""The table of rules, a file for each family of ops.

Each file has a dict `RULES`. It maps names of ops, separated by blanks, to the rule's text, or, where the rule depends
on the arguments, to a function that writes the text for a node (None: there is no rule for these arguments). A name
stands for all forms of the op: `torch.tanh`, `Tensor.tanh`, `Tensor.tanh_`, and, if the rule is a text,
`torch.ops.aten.tanh.default`. Functions that write rules of ATen's operators, whose arguments may have another order,
are in a dict `OPERATORS`.
"""
