"""With inputs="local" calls are looked up by stand-ins for whole batches, made from one rank's part."""

import torch
from torch import nn

from autopar.layout import Layout
from autopar.runtime.calling.calls import global_stand_ins


def test_they_need_gradients_where_the_parts_do():
    part = torch.randn(4, 3, requires_grad=True)
    (whole,), _ = global_stand_ins(nn.Linear(3, 3).forward, {"input": (Layout.parse("S0"), (2,))}, None, (part,), {})
    assert (whole.shape, whole.requires_grad) == ((8, 3), True)
    (whole,), _ = global_stand_ins(nn.Linear(3, 3).forward, {}, None, (part.detach(),), {})
    assert (whole.shape, whole.requires_grad) == ((4, 3), False)
