"""What is under way for one call of a model: gathers of parameters, and reductions of their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.runtime.communication.gathers import Gathers
from autopar.runtime.communication.reductions import Reductions
from autopar.runtime.communication.route import Route
from autopar.runtime.communication.unwanted import end_those_left
from autopar.runtime.gradients.accumulation import Accumulation


class Transit:
    """One call. `shards`: local tensors of the state by place, detached; `parameters`: the tensors that hold them."""

    def __init__(
        self,
        route: Route,
        shards: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        accumulation: Accumulation,
    ) -> None:
        self.gathers = Gathers(route, shards)
        self.reductions = Reductions(route, parameters, accumulation)
        end_those_left()
