"""Running a plan: the only part of autopar that touches `torch.distributed`.

Nothing is imported here: planning uses some of the modules, and does without DTensor, which takes long to import.
"""
