"""Mistakes made on real ranks: every rank gets a clear error, and no rank waits for another."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from forked import run_script

RANKS = 2
EXPECTED = {
    "budget_too_small": ("InfeasibleError", r"smallest.*\d"),
    "later_call_does_not_fit": ("InfeasibleError", r"(?s)smallest.*\d.*planned separately.*set on a module"),
    "call_beside_a_given_plan_does_not_fit": ("InfeasibleError", r"(?s)smallest.*\d.*planned separately"),
    "plan_for_another_optimizer": ("PlanMismatchError", r"has optimizer='sgd', not 'adam'"),
    "plan_of_another_model": ("PlanMismatchError", r"another model"),
    "plan_of_another_mesh": ("PlanMismatchError", r"mesh of 4.*this one is 2"),
    "another_shape": ("InputError", r"worker\.py:\d+"),
    "different_global_batches": ("InputError|PlanMismatchError", r"global"),
    "different_rows": ("InputError", r"rank 0 has 4 rows, rank 1 has 6\..*autopar\.sampler"),
    "different_modes": ("InputError", r"ranks \d and \d make different calls.*train\(\) or eval\(\)"),
    "different_values": ("InputError", r"ranks \d and \d make different calls.*values set on its modules"),
    "unknown_argument": ("InputError", r"labels"),
    "mesh_too_large": ("RuntimeError|InputError|ValueError", r"[Mm]esh"),
    "mesh_too_small": ("InputError", r"the mesh has 1 ranks and there are 2: use them all"),
    "one_rank_differs": ("PlanMismatchError", r"rank"),
    "one_rank_fails": ("InputError|PlanMismatchError", r"rank|'y'"),
    "one_rank_has_other_code": ("PlanMismatchError", r"disagree about the code \(autopar, torch"),
    "one_rank_has_a_plan": ("PlanMismatchError", r"disagree about whether a plan is given"),
    "one_rank_has_other_options": ("PlanMismatchError", r"disagree about the option memory_budget \(\d+ here\)"),
    "ranks_at_different_calls": ("InputError", r"1 of 2 ranks called (save|latest)_checkpoint, and rank \d called"),
    "broken_forward": ("UntraceableError", r"worker\.py:\d+"),
    "early_optimizer": ("InputError", r"optimizer"),
    "no_mesh": ("InputError", r"device_mesh is of int.*init_device_mesh"),
    "examples_without_names": ("InputError", r"meta_args is of tuple.*\{'x': \.\.\."),
    "wrapped_before": ("InputError", r"wrapped in DistributedDataParallel: pass what it wraps"),
    "sharded_before": ("InputError", r"'up\.weight', .* are DTensors already \(fully_shard"),
    "parameters_shared": (
        "InputError",
        r"'down\.weight' is also in a model that was planned before.*as one",
    ),
    "noise_in_a_hook": ("InputError", r"a hook was registered on 'up' after the model was planned"),
    "saved_on_one_rank": ("InputError", r"1 of 2 ranks called (accelerate's saving|latest_ch).*take it out"),
    "module_replaced": ("InputError", r"the module 'down' was replaced.* then autoparallelize"),
    "module_added": (
        "InputError",
        r"the module 'more\.0' was added after .* then autoparallelize",
    ),
    "weights_tied_late": (
        "InputError",
        r"'down\.weight' was replaced.*with placements \[Shard\(dim=0\)\].*tie weights before",
    ),
    "optimizer_for_plain_tensors": ("InputError", r"torch's Adafactor cannot update sharded.*autopar\.Adafactor"),
    "optimizer_that_writes_by_masks": ("InputError", r"torch's Rprop cannot update sharded.*'param:\* = R'"),
    "submodule_copied": ("InputError", r"a copy of 'up' of a planned model was called.*copy the whole planned model"),
    "model_pickled": ("InputError", r"cannot be pickled.*export_full_state"),
    "parameter_replaced": ("InputError", r"'down\.bias' was replaced.*copy_"),
}


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The errors of each rank, for each mistake."""
    folder = tmp_path_factory.mktemp("mistakes")
    run_script(Path(__file__).with_name("worker.py"), str(folder), folder=folder, ranks=RANKS, timeout_seconds=240)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("mistake", EXPECTED)
def test_every_rank_gets_a_clear_error_soon(mistake: str, met: list[dict[str, Any]]) -> None:
    kind, message = EXPECTED[mistake]
    for rank in met:
        assert set(kind.split("|")) & set(rank[mistake]["kinds"]), rank[mistake]
        assert re.search(message, rank[mistake]["message"], re.DOTALL), rank[mistake]
        assert rank[mistake]["seconds"] < 30, "no hang: the process group's timeout is 60 seconds"
