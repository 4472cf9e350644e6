"""Attention with dropout in a fused kernel that draws its own numbers. CPUs have none, so a substitute draws from the
default generator, as the kernel does."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from autopar.layout import Layout
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.local import masks
from autopar.runtime.local.context import LocalContext

SHAPE = (4, 2, 8, 16)


def attended(layout: str, rank: int, key: int, position: int = 3) -> torch.Tensor:
    """One of two ranks' attention results; keys and queries are equal, so that results differ only by dropout."""
    found = Layout.parse(layout)
    of_keys = Layout.replicated(1) if layout == "S2" else found
    lie, shapes = (found, of_keys, of_keys), (SHAPE,) * 3
    context = LocalContext(LocalMesh((2,), (rank,), ("g",)), lie, (found,), shapes, (SHAPE,), position)
    query = torch.zeros(context.local_shape())
    given = query, torch.zeros(SHAPE) if layout == "S2" else query, torch.ones(SHAPE if layout == "S2" else query.shape)
    step = torch.tensor(key)
    made = masks.attention_dropout(F.scaled_dot_product_attention, given, {"dropout_p": 0.5}, context, step)
    again = masks.attention_dropout(F.scaled_dot_product_attention, given, {"dropout_p": 0.5}, context, step)
    torch.testing.assert_close(made, again, rtol=0, atol=0)  # as in a replay
    return made.detach()


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "takes_fused", lambda *args, **kwargs: True)


def test_ranks_draw_alike_where_they_have_the_same_part() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, other = (attended("R", rank, key=7) for rank in range(2))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert 0.7 < float(one.mean()) < 1.3 and one.std() > 0.1
    # the loop's own random numbers are unaffected
    torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["S0", "S1"])
def test_parts_steps_and_layers_draw_anew(layout: str) -> None:
    drawn = [
        attended(layout, 0, 7),
        attended(layout, 1, 7),
        attended(layout, 0, 1 << 40),
        attended(layout, 0, 7, position=4),
    ]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert not torch.equal(one, other)


def test_a_part_of_the_queries_has_the_mask_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused kernel does not know the positions of its queries, so it is not used for a part of them."""
    part = attended("S2", 1, key=7)
    monkeypatch.setattr(masks, "takes_fused", lambda *args, **kwargs: False)
    torch.testing.assert_close(part, attended("R", 0, key=7)[:, :, 4:], rtol=0, atol=1e-6)
