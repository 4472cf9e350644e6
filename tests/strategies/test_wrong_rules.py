"""The executed check rejects wrong rules: each of these is wrong in one respect."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autopar.errors import RuleError
from autopar.strategies import table
from autopar.strategies.check import check
from autopar.strategies.examples import example


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


WRONG: dict[str, tuple[Any, ...]] = {
    "softmax splits its dim": ("... -> ...", F.softmax, x(6, 4), -1),
    "layer_norm splits its dim": ("... d, [d]?, [d]? -> ... d", F.layer_norm, x(6, 4), (4,), x(4), x(4)),
    "a nonlinear op passes partial values": ("... -> ... | linear", F.gelu, x(6, 4)),
    "a sum with a number passes partial values": ("... -> ... | linear", operator.add, x(6, 4), 2.0),
    "a product is linear in both factors together": ("..., ... -> ... | linear", operator.mul, x(6, 4), x(6, 4)),
    "a bias is added to a partial sum": ("... i, o i, o -> ... o", F.linear, x(6, 4), x(4, 4), x(4)),
    "transposed dims": ("a b -> a b", "t", x(4, 4)),
    "factors of a merged dim in the wrong order": ("(a=2 b=6) -> b a", "view", x(12), 6, 2),
    "a view without its local shape": ("(a=6 b=2) -> a b", "view", x(12), 6, 2),
    "a contraction that keeps the sum on each rank": ("m k, k n -> m n | k whole", torch.mm, x(4, 6), x(6, 4)),
    "maximum joined by sum": ("k -> ", torch.amax, x(12), 0),
    "a mean of unequal pieces": ("a b -> a | b @mean ragged", torch.mean, x(6, 5), 1),
    "mean joined by sum": ("a b -> a", torch.mean, x(6, 12), 1),
    "a mean of two dims joined by the wrong one": ("a b -> b | a mean", torch.sum, x(6, 12), 0),
    "a cut across units": ("a b -> a (c=2! k=3)", operator.getitem, x(6, 12), (slice(None), slice(0, 6))),
    "batch norm from the local batch": ("b c, [c]?, [c]? -> b c", F.batch_norm, x(6, 4), None, None, x(4), x(4), True),
    "instance norm keeps statistics of the local batch": (
        "b c ...!, [c]?, [c]? -> b c ...!", F.instance_norm, x(6, 4, 3), x(4).detach(), x(4).detach(),
    ),
    "causal attention by local positions": (
        "b h q e!, b h k! e!, b h k! e! -> b h q e!",
        F.scaled_dot_product_attention, x(2, 2, 6, 2), x(2, 2, 6, 2), x(2, 2, 6, 2), None, 0.0, True,
    ),
    "two factors that are one": ("m k, k n -> m n", torch.outer, x(6), x(6)),
    "dim sizes that do not match": ("a b -> b a", F.relu, x(6, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rule_is_found(name: str, ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text, target, *args = WRONG[name]
    node, tensors = example(target, *args)
    entry = table.entry(node)
    assert entry is not None
    check(node, tensors, (2,), ranks=ranks)
    monkeypatch.setitem(table.TABLE, entry.name, dataclasses.replace(entry, rule=text))
    with pytest.raises((RuleError, RuntimeError)):
        check(node, tensors, (2,), ranks=ranks)


def test_message_names_rule_strategy_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    node, tensors = example(F.gelu, x(6, 4))
    monkeypatch.setitem(table.TABLE, "gelu", dataclasses.replace(table.TABLE["gelu"], rule="... -> ... | linear"))
    with pytest.raises(RuleError, match=r"rule '... -> ... \| linear', split as P: \[P\] -> \[P\]: output 0 is off by"):
        check(node, tensors, (2,))
