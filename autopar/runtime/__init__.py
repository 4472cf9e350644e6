"""Running a plan: the only part of autopar that touches `torch.distributed`.

Nothing is imported here: planning asks for some of its files, and does without DTensor, which takes long to import.
"""
