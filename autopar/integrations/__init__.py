"""Planned models in the training loops of other libraries; each module needs its library, which autopar does not.

`huggingface`: accelerate, and the Trainer of transformers.
"""
