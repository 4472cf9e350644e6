"""The predicted peak matches steps on real ranks with frozen parameters, where the peak may be in forward."""

from __future__ import annotations

from typing import Any

import pytest
from check_peak import check_peak
from frozen_peak_cases import CASES, LAYERS, RECOMPUTING
from launch import launch, selected
from thinned import every

UNDER, OVER = 0.005, 0.05  # fractions by which a step may exceed the prediction, and be below it
TRAINED = [case for case in CASES[2] if "trained" in case]
OVER_IN_PARTS = 0.08  # the embedding is one bucket, and buckets of adapters beside it count as equally large


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch("frozen_peak_cases.py", 2, cases=[*TRAINED, *selected(request)], timeout_seconds=600)


def test_frozen_weights_are_gathered_again_and_train_the_same(ranks: list[dict[str, Any]]) -> None:
    """Frozen weights with trained layers before them are regathered in backward; the first ones are not read there."""
    for rank in ranks:
        again = _trained(rank["adapters, trained, fsdp"])["again"]
        assert {"model.layers.1.mlp.up_proj.weight", "model.layers.3.self_attn.q_proj.base.weight"} <= set(again)
        assert "model.embed_tokens.weight" not in again


@pytest.mark.parametrize("preset", RECOMPUTING)
def test_with_all_blocks_recomputed_they_train_the_same(ranks: list[dict[str, Any]], preset: str) -> None:
    """Also the first block, whose input needs no gradient."""
    for rank in ranks:
        found = _trained(rank[f"adapters, trained, {preset}"])
        assert found["recomputed"] == [f"model.layers.{i}" for i in range(LAYERS)]


def _trained(found: dict[str, Any]) -> dict[str, Any]:
    """The result of a case, after checking that its losses are those of one process."""
    assert "value" in found, found
    alone, many = found["value"]["losses"]
    assert alone == pytest.approx(many, rel=1e-12)
    assert alone[-1] < alone[0]
    return dict(found["value"])


@pytest.mark.parametrize("case", every(3, [case for case in CASES[2] if case not in TRAINED]))
def test_peak(ranks: list[dict[str, Any]], case: str) -> None:
    over = OVER_IN_PARTS if "words, adapters" in case else OVER
    for rank in ranks:
        check_peak(rank[case], under=UNDER, over=over)
