"""`torch.inference_mode` inside a model is treated as `no_grad`.

Tensors of inference mode have no version counter, which is how writes are detected. A graph keeps only the effect on
grad mode: off, or on for `inference_mode(False)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from autopar.tracing.patching import attributes_set


@contextlib.contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """While inside, entering `inference_mode` only turns gradients off; tensors are ordinary ones."""
    active = [torch.is_inference_mode_enabled()]

    def enter(self: torch.inference_mode) -> None:
        self._before = torch.is_grad_enabled()  # type: ignore[attr-defined]
        active.append(self.mode)
        torch._C._set_grad_enabled(not self.mode)

    def leave(self: torch.inference_mode, *error: object) -> None:
        active.pop()
        torch._C._set_grad_enabled(self._before)  # type: ignore[attr-defined]

    with (
        attributes_set(torch.inference_mode, __enter__=enter, __exit__=leave),
        attributes_set(torch, is_inference_mode_enabled=lambda: active[-1]),
    ):
        yield
