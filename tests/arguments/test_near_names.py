"""The pattern suggested for one that matches nothing is similar to it, and matches something."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.arguments.near_names import did_you_mean

NAMES = [
    f"model.layers.{i}.{part}.weight" for i in range(12) for part in ("self_attn.q_proj", "mlp.up_proj", "input_norm")
]
NAMES += ["model.embed_tokens.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("lm_head", "lm_head.*"),
        ("layers.*.mlp.up_proj.weight", "*.layers.*.mlp.up_proj.weight"),
        ("model.layers.*.mlp.upproj.weight", "model.layers.*.mlp.up_proj.weight"),
        ("model.layer.*.mlp", "model.layers.*.mlp.*"),
        ("up_proj", "*.up_proj.*"),
        ("lmhead.weight", "lm_head.weight"),
    ],
)
def test_the_nearest_is_offered(pattern: str, near: str) -> None:
    assert did_you_mean(pattern, NAMES) == f": did you mean '{near}'?"


@given(st.sampled_from(NAMES), st.data())
def test_a_name_without_one_letter_is_offered_as_something_that_matches(name: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(name) - 1))
    broken = name[:place] + name[place + 1 :]
    told = re.fullmatch(r": did you mean '(.+)'\?", did_you_mean(broken, NAMES))
    assert told is not None
    assert any(fnmatchcase(one, told[1]) for one in NAMES)


def test_nothing_is_offered_where_nothing_is_near() -> None:
    assert did_you_mean("vision.*", NAMES) == did_you_mean("anything", []) == ""
