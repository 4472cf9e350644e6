"""Labels that a mask picks of padded rows, as CTC losses are given them: all in a row, as many as the data says.

No data-free tensor stands for them. The loss takes padded rows as well, with the same lengths, and these have a size:
what is picked of a row comes first there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.tracing.data_free import DATA_FREE
from autopar.tracing.targets import methods

if TYPE_CHECKING:
    from autopar.tracing.errors import UnknownDataError
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor
_SUMS = ("sum", torch.sum)
_CASTS = ("to", "long", "int")
SELECTING = methods("masked_select")


class Selected:
    """What a mask of unknown contents picks of rows of integers; whoever else asks for it gets UnknownDataError."""

    def __init__(self, recorder: Recorder, values: Tensor, mask: Tensor) -> None:
        self._recorder, self._values, self._mask = recorder, values, mask

    @staticmethod
    def of(recorder: Recorder, args: Any) -> Selected | None:
        """Of a call's arguments, where they are such rows and a mask of theirs."""
        values, mask = args if len(args) == 2 else (None, None)
        if not isinstance(values, Tensor) or not isinstance(mask, Tensor) or values.is_floating_point():
            return None
        return Selected(recorder, values, mask) if values.ndim == 2 and values.shape == mask.shape else None

    def __getattr__(self, name: str) -> Any:
        raise self.unknown()

    def unknown(self) -> UnknownDataError:
        what = "masked_select could not be computed on data-free tensors (how many elements it picks depends on data)"
        return self._recorder.unknown(what, deciding=[self._mask])

    def padded(self, lengths: object) -> Tensor:
        """The rows, what is picked first in each, and zeros behind; `lengths`: how much that is.

        Raises UnknownDataError where these are not the mask's own counts.
        """
        if not self._counts(lengths):
            raise self.unknown()
        with self._recorder:
            others = self._mask.logical_not()
            order = others.to(torch.uint8).argsort(dim=1, stable=True)
            return self._values.gather(1, order).masked_fill(others.gather(1, order), 0)

    def _counts(self, lengths: object) -> bool:
        """Whether some lengths are the sums of the mask's rows, as they are or in another dtype."""
        node = self._recorder.nodes.get(id(lengths))
        while node is not None and node.target in _CASTS and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        if node is None or node.target not in _SUMS or node.args[0] is not self._recorder.nodes.get(id(self._mask)):
            return False
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return dim in (1, -1, (1,), (-1,), [1], [-1])


def ctc_loss(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """The call, with padded rows in the place of labels that a mask has picked."""
    names = ("log_probs", "targets", "input_lengths", "target_lengths")
    given = dict(zip(names, args, strict=False)) | kwargs
    if isinstance(given.get("targets"), Selected):
        padded = given["targets"].padded(given["target_lengths"])
        if len(args) > 1:
            args = (args[0], padded, *args[2:])
        else:
            kwargs = {**kwargs, "targets": padded}
    return DATA_FREE[func](recorder, func, args, kwargs)
