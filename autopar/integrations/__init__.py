"""Planned models in the training loops of other libraries; each module imports its library, an optional dependency.

`huggingface`: accelerate, and the Trainer of transformers.
"""
