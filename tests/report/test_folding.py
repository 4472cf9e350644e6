"""Folding reports every row once: nothing is lost or repeated, and only equal blocks are merged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar.report.folding import fold

_paths = st.lists(st.sampled_from(["a", "b", "0", "1", "2"]), max_size=4).map(".".join)


@given(st.lists(st.tuples(_paths, st.sampled_from(["x", "y"])), max_size=30))
def test_repeats_count_every_row(rows: list[tuple[str, str]]) -> None:
    lines = fold(rows)
    for name in ("x", "y"):
        assert sum(line.repeats for line in lines if line.row == name) == sum(row == name for _, row in rows)


def test_a_block_that_differs_stands_alone() -> None:
    rows = [(f"h.{i}", "sharded" if i == 2 else "whole") for i in range(5)]
    assert [(line.label, line.row, line.repeats) for line in fold(rows)] == [
        ("h", None, 1),
        ("{0,1}", "whole", 2),
        ("2", "sharded", 1),
        ("{3,4}", "whole", 2),
    ]


def test_numbered_parts_inside_a_block_are_no_repeats() -> None:
    rows = [(f"block.{i}.layer.{j}", f"kind {j}") for i in range(3) for j in range(2)]
    assert [(line.depth, line.label, line.row, line.repeats) for line in fold(rows)] == [
        (0, "block.{0-2}.layer", None, 3),
        (1, "0", "kind 0", 3),
        (1, "1", "kind 1", 3),
    ]


def test_neighbours_join_only_inside_one_module() -> None:
    rows = [("a", 1), ("a", 2), ("b", 3), ("a", 4)]
    lines = fold(rows, lambda first, second: first + second)
    assert [(line.label, line.row) for line in lines] == [("a", 7), ("b", 3)]
