"""The text of `explain` agrees with the plan, is complete, and fits a terminal."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.layout import Layout
from autopar.plans import Alternative, Collective, Plan
from autopar.precision import Precision
from autopar.report.figures import device_notes, summary
from autopar.report.page import page
from autopar.report.tables import WIDTH, show_seconds
from autopar.sizes import show_bytes


def _section(text: str, title: str) -> list[str]:
    """The lines of the section that begins with `title`."""
    return next(part for part in text.split("\n\n") if part.startswith(title)).splitlines()[1:]


def test_fits_100_columns_without_colour(plan: Plan) -> None:
    wide = replace(plan, notes=("x" * 300 + " " + "word " * 100,), constraints=("fsdp",) * 50)
    for text in (plan.explain(), wide.explain()):
        assert "\x1b" not in text
        assert all(len(line) <= WIDTH for line in text.splitlines())


def test_a_plan_read_back_explains_itself_alike(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()).explain() == plan.explain()


def test_summary_names_mesh_budget_size_and_proof(plan: Plan) -> None:
    text = "\n".join(_section(plan.explain(), "Plan"))
    assert "dp=2 x tp=2 (4 devices, cpu)" in text
    assert "43.0 MiB per device at the peak, of a budget of 64.0 MiB (67.2 %)" in text
    assert "2,096 ops -> 41 decisions" in text
    assert "optimal (HiGHS)" in text
    assert "gap 0.00 %" in text


def test_repeated_blocks_are_told_once(plan: Plan) -> None:
    layouts = _section(plan.explain(), "Layouts")
    assert [line.split() for line in layouts if "c_proj" in line] == [
        ["c_proj", "·", "linear", "8x256x64", "S0", "P", "input", "features"]
    ]
    assert any("h.{0-3}" in line for line in layouts)
    assert not any("view" in line for line in layouts)


def test_the_legend_explains_the_placements_that_occur(plan: Plan) -> None:
    legend = " ".join(_section(plan.explain(), "Layouts")[-2:])
    assert "P partial sum" in legend
    assert "R+" not in legend
    assert "the word after it" in legend
    wordless = replace(plan, nodes=tuple(replace(node, factors=()) for node in plan.nodes))
    assert "the word after it" not in wordless.explain()


def test_a_note_names_an_axis_over_which_nothing_is_split(plan: Plan) -> None:
    assert "nothing is split" not in plan.explain()
    nodes = tuple(replace(n, outputs=tuple(_whole_on_tp(out) for out in n.outputs)) for n in plan.nodes)
    parameters = tuple(replace(p, storage=_whole_on_tp(p.storage)) for p in plan.parameters)
    idle = replace(plan, nodes=nodes, parameters=parameters)
    assert "nothing is split over tp: its 2 devices all do the same work" in idle.explain()
    assert "nothing is split over dp" not in idle.explain()
    assert "nothing is split over tp" in summary(idle)["notes"][-1]
    assert "nothing is split over tp" in page(idle)


def test_notes_name_what_the_device_does_not_have(plan: Plan) -> None:
    assert not device_notes(plan)
    cluster = Cluster.preset("v100-16", (2, 2), ("dp", "tp")).to_dict()
    large = replace(plan, predicted=replace(plan.predicted, peak_bytes=20 << 30), memory_budget_bytes=1 << 40)
    assert "the peak of 20.0 GiB is more than the 15.2 GiB that one v100-16 has" in device_notes(
        replace(large, cluster=cluster)
    )
    in_bf16 = replace(plan, cluster=cluster, precision=Precision.of("bf16").to_dict())
    [note] = device_notes(in_bf16)
    assert "no fast bfloat16 matrix products: 15.7 TFLOP/s, against 125 TFLOP/s in float16" in note
    assert note in " ".join(in_bf16.explain().split())
    assert not device_notes(replace(in_bf16, precision=Precision.of("fp16").to_dict()))
    assert not device_notes(replace(in_bf16, cluster=Cluster.preset("h100", (2, 2), ("dp", "tp")).to_dict()))


def test_one_device_is_one(plan: Plan) -> None:
    assert "(4 devices, cpu)" in plan.explain()
    assert "(1 device, cpu)" in replace(plan, mesh_shape=(1, 1)).explain()


def _whole_on_tp(layout: Layout) -> Layout:
    return Layout((layout.placements[0], Layout.parse("R").placements[0]))


def test_parameters_tell_storage_and_what_moves_them(plan: Plan) -> None:
    rows = [" ".join(line.split()) for line in _section(plan.explain(), "Parameters")]
    assert "wte.weight 256x64 float32 R R nothing" in rows
    assert rows[-1].startswith("(nothing: it is used as stored")
    assert "h.{0-3}.mlp.c_fc.weight 256x64 float32 S1 S0 all-gather dp twice" in rows


def test_collectives_sum_to_what_the_plan_announces(plan: Plan) -> None:
    calls = sum(c.count for c in plan.collectives)
    volume = show_bytes(sum(c.bytes * c.count for c in plan.collectives))
    seconds = show_seconds(sum(c.seconds for c in plan.collectives))
    rows = [" ".join(line.split()) for line in _section(plan.explain(), "Collectives")]
    assert rows[-1] == f"total {calls} {volume} {seconds}"
    assert "all_gather backward dp 8 32.0 KiB 4.00 ms parameters" in rows
    assert _section(replace(plan, collectives=()).explain(), "Collectives") == ["  none"]


def test_memory_names_the_moment_of_the_peak(plan: Plan) -> None:
    text = plan.explain()
    assert "Memory per device at the peak, end of forward" in text
    assert any(line.split() == ["budget", "64.0", "MiB", "21.0", "MiB", "free"] for line in text.splitlines())
    held = replace(plan, memory_budget_bytes=None, cluster={"device": {"name": "cpu", "memory_bytes": 1 << 30}})
    assert "per device at the peak, of 1.0 GiB usable (4.2 %)" in held.explain()
    on_gpu = replace(held, cluster={"device": {"name": "h100", "kind": "cuda", "memory_bytes": 1000 << 20}})
    assert "per device at the peak, of 950.0 MiB usable (4.5 %)" in on_gpu.explain()


def test_what_a_replay_sends_again_is_told_beside_what_it_computes(plan: Plan) -> None:
    gathers = Collective("all_gather", 1, 2**20, 4, 0.005, "replay", "parameters")
    alone = replace(plan, collectives=[c for c in plan.collectives if c.phase != "replay"])
    assert _section(alone.explain(), "Recomputed")[-1].endswith("ops run again: 20.0 ms a step")
    both = replace(alone, collectives=(*alone.collectives, gathers)).explain()
    assert _section(both, "Recomputed")[-1].endswith("15.0 ms a step, plus 5.00 ms of repeated collectives")


def test_recompute_folds_block_numbers(plan: Plan) -> None:
    assert "  transformer.h.{0,1,3}: 3 segments" in _section(plan.explain(), "Recomputed")
    assert _section(replace(plan, recompute=()).explain(), "Recomputed") == ["  nothing: every activation is kept"]


def test_shares_of_the_step_are_of_the_whole(plan: Plan) -> None:
    shares = [float(line.split()[-2]) for line in _section(plan.explain(), "Predicted") if line.endswith("%")]
    assert abs(sum(shares) - 100) < 0.3


def test_only_letters_with_a_meaning_are_told(plan: Plan) -> None:
    lines = _section(plan.explain(), "Layouts")
    assert any(line.split()[-3:] == ["S2", "output", "features"] for line in lines if "c_fc" in line)
    # "b" in the rule of an addition can be any dim
    assert [line.split()[-2:] for line in lines if "· add" in line] == [["S0", "R"]]


def test_flops_have_the_prefix_that_suits_them(plan: Plan) -> None:
    assert "10.0 GFLOP a step" in plan.explain()
    small = replace(plan, predicted=replace(plan.predicted, flops=2_500_000))
    assert "2.50 MFLOP a step" in small.explain()


def test_what_is_hidden_behind_compute_is_told_apart(plan: Plan) -> None:
    overlapped = replace(plan, predicted=replace(plan.predicted, step_seconds=0.24))
    assert any(line.split()[:3] == ["hidden", "-10.0", "ms"] for line in _section(overlapped.explain(), "Predicted"))


def test_alternatives_stand_beside_the_plan(plan: Plan) -> None:
    assert "Comparison" not in plan.explain()
    slower = replace(plan.predicted, step_seconds=0.5, moments=())
    compared = replace(
        plan,
        comparison=(
            Alternative("ddp", False, slower, 2**30, smallest_budget_bytes=80 * 2**20),
            Alternative("fsdp", True, slower, 2**20, note="feasible: a plan 3.0 % faster may exist"),
            Alternative("hsdp", False, None, note="constraint 'hsdp' needs a mesh of two axes or more"),
        ),
    )
    rows = [" ".join(line.split()) for line in _section(compared.explain(), "Comparison")]
    assert rows[1].startswith("this plan 250 ms 1.00x 200 ms")
    assert rows[1].endswith("43.0 MiB fits")
    assert rows[2].startswith("ddp 500 ms 2.00x") and rows[2].endswith("1.0 GiB 43.0 MiB needs 80.00 MiB")
    assert rows[4] == "hsdp no plan"
    assert rows[5:] == [
        "fsdp: feasible: a plan 3.0 % faster may exist",
        "hsdp: constraint 'hsdp' needs a mesh of two axes or more",
    ]


def test_the_summary_holds_the_same_figures_as_json(plan: Plan) -> None:
    figures = json.loads(json.dumps(summary(plan)))
    assert sum(c["bytes"] for c in figures["collectives"]) == sum(c.bytes * c.count for c in plan.collectives)
    assert sum(figures["step_seconds_by_part"].values()) == pytest.approx(figures["step_seconds"])
    assert sum(figures["peak_bytes_by_part"].values()) == figures["peak_bytes"]
    assert figures["recompute"] == [{"name": "transformer.h.{0,1,3}", "segments": 3}]


def test_notes_come_last(plan: Plan) -> None:
    assert plan.explain().rstrip().endswith("- torch.foo has no rule: replicated [at model.py:3]")
