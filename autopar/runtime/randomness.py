"""Counter-based random numbers: a hash of (seed, step, node, global index), in plain integer torch ops.

An element gets the same number whichever rank holds it, and however often the op is replayed. The key of a step is
passed as a tensor argument: a replay after a later forward still sees its own key, and nothing recompiles.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.runtime.communication import collectives
from autopar.runtime.torch_states import follow

# 64-bit mixing: D. Lea and S. Vigna, splitmix64. 32-bit mixing: C. Wellons, "Prospecting for hash functions" (2018).
_GOLDEN_64, _MIX_64_A, _MIX_64_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MIX_32_A, _MIX_32_B = 0x7FEB352D, 0x846CA68B


def _signed(value: int, bits: int) -> int:
    """An unsigned constant as a two's complement integer, since integer tensors wrap around in that form."""
    return value - (1 << bits) if value >> (bits - 1) else value


class RandomState:
    """The seed, and how many training forwards have drawn from it; `counter` is a plain tensor on the device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.counter = torch.zeros((), dtype=torch.int64, device=device)
        self.seed = torch.tensor(_signed(seed % (1 << 64), 64), dtype=torch.int64, device=device)
        follow(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # of a copy
        follow(self)

    def next_key(self) -> torch.Tensor:
        """The key of one training forward: a new int64 scalar."""
        self.counter.add_(1)
        return _mix_64(_mix_64(self.seed) + self.counter)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"seed": self.seed.clone(), "counter": self.counter.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed.copy_(state["seed"])
        self.counter.copy_(state["counter"])


def agree_seed(groups: Sequence[str], device: torch.device) -> int:
    """The largest of the ranks' `torch.initial_seed()`, the same on every rank; `groups`: one name for each axis."""
    seed = torch.tensor(torch.initial_seed() % (1 << 63), dtype=torch.int64, device=device)
    for group in groups:
        seed = collectives.all_reduce(seed, "max", group)
    return int(seed.item())


_default_generators = threading.Lock()  # they belong to the process: ranks in threads take turns


_numbers = WeakTensorKeyDictionary()


def number_of(key: torch.Tensor) -> int:
    """The key as a number, cached: on a GPU, only the first request has to wait for it."""
    number = _numbers.get(key)
    if number is None:
        number = _numbers[key] = int(key)
    return int(number)


@contextmanager
def seeded(key: torch.Tensor, position: int) -> Iterator[None]:
    """While inside, default generators are seeded by the step's key and the node's position; then they are restored."""
    with _default_generators, torch.random.fork_rng([key.device] if key.device.type == "cuda" else []):
        torch.manual_seed(number_of(key) + position)
        yield


def bits(key: torch.Tensor, position: int, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Uniform int32 numbers, one for each combination of the `indices` (int32, one vector a dim).

    Prefixes of the index are mixed at their own, small size; only the last dim is mixed at full size. The first
    operation on an index is neither a sum nor a product: inductor turns one of an `arange` into arithmetic on a loop
    counter, in C++ where overflow is undefined, and loops that also reduce a row did not end (torch 2.13).
    """
    node = _mix_64(key + _signed(_GOLDEN_64 * (position + 1) % (1 << 64), 64))
    low, high = node.to(torch.int32), (node >> 32).to(torch.int32)
    if not indices:
        return _mix_32_(low.clone())
    prefix = low
    for index in indices[:-1]:
        prefix = _mix_32(prefix.unsqueeze(-1) ^ index)
    last = _mix_32(indices[-1] ^ high)
    return _mix_32_(prefix.unsqueeze(-1) + last)


def keep(bits: torch.Tensor, drop: float) -> torch.Tensor:
    """True with probability 1 - `drop` (to 2^-32)."""
    return bits >= min(round(drop * (1 << 32)), (1 << 32) - 1) - (1 << 31)


def _mix_64(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64; its logical shifts are arithmetic shifts with a mask."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MIX_64_A, 64)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MIX_64_B, 64)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix_32(x: torch.Tensor) -> torch.Tensor:
    """The whole 32-bit finaliser: it maps consecutive numbers to ones whose sums do not repeat."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MIX_32_A
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(_MIX_32_B, 32)
    return x ^ ((x >> 16) & 0xFFFF)


def _mix_32_(x: torch.Tensor) -> torch.Tensor:
    """The middle of the finaliser, in place, for large tensors of sums of mixed numbers. (The last eight bits are weak;
    they are only read together with all others.)"""
    x.mul_(_MIX_32_A)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(_MIX_32_B, 32))
