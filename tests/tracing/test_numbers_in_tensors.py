"""Sizes stored in tensors, in known inputs or small integer buffers, are read by the trace and guarded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.tracing import ArgumentError, UnknownDataError, known, trace


def viewed(x, grid):
    outputs = []
    for part, (down, across) in zip(x.split(grid.prod(1).tolist()), grid, strict=True):
        outputs.append(part.view(down, across, -1).transpose(0, 1).reshape(across * down, -1))
    return torch.cat(outputs)


def repeated(x, grid):
    return torch.cat([torch.repeat_interleave(row, times, dim=0) for row, times in zip(x[:2], grid, strict=True)])


def repeated_as_keyword(x, grid):
    return x[:2].repeat_interleave(repeats=grid[:, 0], dim=0) * 2


def one_for_all(x, grid):
    return torch.repeat_interleave(x, grid[0, 1:], dim=1)


def padded(x, grid):
    return nn.functional.pad(x, (0, grid[0, 0], 0, grid[1, 1]))


GRID = torch.tensor([[2, 3], [1, 4]])


@pytest.mark.parametrize("function", [viewed, repeated_as_keyword, one_for_all, padded])
def test_a_size_in_a_known_tensor_is_read_and_guarded(function):
    x = torch.randn(10, 4)
    traced = trace(function, dict(x=x, grid=known(GRID)))
    assert torch.equal(traced.gm(*traced.bind((x, GRID))), function(x, GRID))
    with pytest.raises(ArgumentError, match=r"the trace took .*test_numbers_in_tensors.py:\d+"):
        traced.bind((x, GRID + 1))


def counted(x):
    count = torch.div(x.shape[0], 2, rounding_mode="trunc")  # a tensor, as in Longformer
    windows = x.view(count, 2, -1).as_strided((4, count * 2 - 1, 2), (1, 4, 4))
    return windows.new_zeros(count + 1, 4).sum() + windows.new_ones(1).view(count - 4, 1) + windows


def test_a_count_made_of_numbers_is_no_input_of_the_ops_whose_sizes_it_is():
    x = torch.randn(10, 4)
    traced = trace(counted, dict(x=x))
    assert torch.equal(traced.gm(x), counted(x))
    assert not traced.find("div")
    for name in ("view", "as_strided", "new_zeros"):
        assert [node for node in traced.find(name) if len(node.all_input_nodes) > 1] == []


def test_repeats_of_rows_are_known_row_by_row():
    x = torch.randn(2, 2, 4)
    traced = trace(repeated, dict(x=x, grid=known(GRID)))
    assert torch.equal(traced.gm(x, GRID), repeated(x, GRID))


@pytest.mark.parametrize("width", [1, 4])
def test_what_a_known_mask_selects_has_a_known_length(width):
    def selected(x, mask):
        return (x * 2).masked_select(mask).cumsum(0)

    x, mask = torch.randn(3, 4), torch.tensor([[True], [False], [True]]).expand(3, width)
    traced = trace(selected, dict(x=x, mask=known(mask)))
    assert torch.equal(traced.gm(x, mask), selected(x, mask))
    assert [n.meta["val"].shape for n in traced.find("masked_select")] == [(8,)]


@pytest.mark.parametrize("function", [viewed, repeated_as_keyword, padded])
def test_a_size_in_an_unknown_tensor_is_refused(function):
    with pytest.raises(UnknownDataError):
        trace(function, dict(x=torch.randn(10, 4), grid=GRID))


class Strided(nn.Module):
    """Pads to whole windows, whose size is in a buffer, as the convolutions of audio codecs do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("width", torch.tensor(4), persistent=False)

    def forward(self, x):
        windows = torch.ceil(x.shape[-1] / self.width).to(torch.int64)
        x = nn.functional.pad(x, (0, int(windows * self.width - x.shape[-1])))
        return x.unflatten(-1, (-1, self.width)).sum(-1)


def test_the_integers_of_a_buffer_are_known_and_guarded():
    model, x = Strided(), torch.randn(2, 10)
    traced = trace(model, dict(x=x))
    assert torch.equal(traced.gm(*traced.bind((x,))), model(x))
    assert model.width.item() == 4 and model.width.device.type == "cpu"
    model.width.fill_(5)
    with pytest.raises(ArgumentError, match=r"test_numbers_in_tensors\.py"):
        traced.bind((x,))


class Counting(nn.Module):
    """Counts its steps and reads the count: no graph would be right for two calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        self.steps += 1
        return x * 2 if self.steps > 10 else x


def test_a_buffer_that_a_step_writes_is_not_known():
    model = Counting()
    with pytest.raises(UnknownDataError, match="contents"):
        trace(model, dict(x=torch.randn(3)))
    assert model.steps.item() == 0


def test_counters_of_batch_norm_are_no_guards():
    model, x = nn.BatchNorm1d(3), torch.randn(4, 3)
    traced = trace(model, dict(input=x))
    assert not traced.reads_values
    traced.gm(x)
    assert model.num_batches_tracked.item() == 1
