"""Kills ranks of training runs at random times, also while a checkpoint is written, and checks that no work is lost.

    python scripts/bench/fault_run.py                     # ten runs, forty kills, four gloo ranks; 10 to 20 minutes
    python scripts/bench/fault_run.py --runs 1 --kills 3  # a short one

Each run is `examples/resume.py` under torchrun (float64, with dropout). A kill sends SIGKILL to a random rank:
at a random moment after a random step, in whatever collective that is, or while a checkpoint is written. torchrun
restarts the ranks. In some runs torchrun itself ends after half of the kills, and half as many ranks resume.

Checks: training resumes from the last complete checkpoint; the losses of all steps, also of repeated ones, equal those
of a run without kills (bitwise until the number of ranks changes, to 1e-9 afterwards), and so do the parameters of the
last checkpoint; nothing exceeds its timeout; no process is left over. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from fault_processes import Hangs, Run, kill
from resume import ByteModel

from autopar import latest_checkpoint, load_checkpoint

STEPS, EVERY = 60, 4  # steps of a run; steps between checkpoints
ROUNDING = 1e-9  # float64 over some dozens of steps, relative to a loss of about 4
SCHEMES = ((), ("fsdp",), ("tp",), ("ddp",))
COLUMNS = (
    "run",
    "ranks",
    "plan",
    "saves",
    "kills",
    "in saves",
    "redone",
    "lost",
    "losses",
    "parameters",
    "hangs",
    "left",
)


@dataclass
class Found:
    """The results of one run."""

    kills: int = 0
    in_saves: int = 0  # kills while a checkpoint was written
    redone: int = 0  # repeated steps
    lost: int = 0  # repeated steps up to the last complete checkpoint: must be 0
    compared: int = 0  # losses
    unequal: int = 0  # losses that differ bitwise on as many ranks, or by more than ROUNDING on fewer
    worst: float = 0.0  # largest relative difference of a loss
    parameters: float = float("inf")  # largest difference in the last checkpoint
    hangs: int = 0
    orphans: int = 0
    notes: list[str] = field(default_factory=list)

    def failed(self, same_ranks: bool) -> bool:
        wrong = self.parameters > (0 if same_ranks else 1e-8) or bool(self.notes)
        return wrong or bool(self.lost or self.unequal or self.hangs or self.orphans)


def words(scheme: Sequence[str], asynchronous: bool, steps: int) -> list[str]:
    flags = [f"--steps={steps}", f"--every={EVERY}", "--dtype=float64", "--timeout=120"]
    return flags + [f"--constraint={one}" for one in scheme] + ["--asynchronous"] * asynchronous


def launches(ranks: int, kills: int, fewer: bool) -> list[tuple[int, int]]:
    """(number of ranks, number of kills) of each launch; all launches but the last end with their last kill."""
    if not fewer:
        return [(ranks, kills)]
    first = (kills + 1) // 2
    return [(ranks, first), (ranks // 2, kills - first)]


def starts(run: Run) -> list[int]:
    """The steps from which the attempts have resumed."""
    return [entry["start"] for entry in run.entries() if "start" in entry]


def steps_since_start(run: Run) -> int:
    entries = run.entries()
    return next((i for i, entry in enumerate(reversed(entries)) if "start" in entry), 0)


def kill_one(run: Run, found: Found, draw: random.Random, in_save: bool) -> tuple[int, int]:
    """Kill a random rank at a random time; returns the step of the last complete checkpoint, and the last step."""
    ahead = draw.randint(1, EVERY + EVERY // 2)
    run.wait(lambda: steps_since_start(run) >= ahead)
    while True:
        if in_save and not run.wait(lambda: run.partial() is not None):
            break  # training has ended
        time.sleep(draw.uniform(0, 0.05))  # the time of some steps, or of most of a save
        complete = run.complete()
        if (run.partial() is not None) == in_save:
            break
    victims = run.ranks()
    if not victims or not kill(draw.choice(victims)):
        found.notes.append("training ended before a kill")
        return 0, 0
    found.kills += 1
    found.in_saves += in_save and run.partial() is not None
    return complete, max((entry["step"] for entry in run.entries() if "step" in entry), default=0)


def compare(found: Found, entries: list[dict[str, Any]], reference: dict[int, float]) -> None:
    """Compare all losses of a run with those of the run without kills."""
    exact, ranks = True, entries[0]["ranks"]
    for entry in entries:
        if "start" in entry:
            exact = exact and entry["ranks"] == ranks
            continue
        want = reference[entry["step"]]
        difference = abs(entry["loss"] - want) / abs(want)
        found.compared += 1
        found.unequal += difference > (0 if exact else ROUNDING)
        found.worst = max(found.worst, difference)


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    model = ByteModel().double()
    load_checkpoint(model, None, checkpoint, random_states=False)
    return dict(model.state_dict())


def one_run(
    folder: Path,
    flags: Sequence[str],
    plan: list[tuple[int, int]],
    draw: random.Random,
    reference: tuple[dict[int, float], dict[str, torch.Tensor]],
    saves: list[bool],
) -> Found:
    """Train with kills; `saves` says for each kill whether it happens while a checkpoint is written."""
    found, run, left = Found(), Run(folder, flags, patience_seconds=300), list(saves)
    before: list[tuple[int, int]] = []  # for each kill: step of the last checkpoint, last step
    try:
        for number, (ranks, kills) in enumerate(plan):
            last, begun = number == len(plan) - 1, len(starts(run))
            run.launch(ranks, restarts=kills if last else kills - 1)
            for killed in range(kills):
                run.wait(lambda expected=begun + killed: len(starts(run)) > expected, nap_seconds=0.02)  # type: ignore[misc]
                before.append(kill_one(run, found, draw, left.pop(0)))
            status = run.ended()
            if (status == 0) != last:
                found.notes.append(f"torchrun ended with {status}")
        if len(starts(run)) != len(before) + 1:
            found.notes.append(f"{len(starts(run))} starts after {len(before)} kills")
        for (complete, reached), again in zip(before, starts(run)[1:], strict=False):
            found.lost += max(0, complete - again)
            found.redone += max(0, reached - again)
        compare(found, run.entries(), reference[0])
        held = parameters(run.checkpoints)
        found.parameters = max((held[k] - v).abs().max().item() for k, v in reference[1].items())
        found.orphans = len(run.orphans())
    except Hangs:
        found.hangs += 1
    finally:
        run.end()
    return found


def uninterrupted(folder: Path, flags: Sequence[str], ranks: int) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    run = Run(folder, flags, patience_seconds=300)
    try:
        run.launch(ranks, 0)
        if status := run.ended():
            raise SystemExit(f"the run without kills ended with {status}:\n{(folder / 'log.txt').read_text()[-3000:]}")
        return {e["step"]: e["loss"] for e in run.entries() if "step" in e}, parameters(run.checkpoints)
    finally:
        run.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kills", type=int, default=4, help="in each run")
    parser.add_argument("--only", type=int, help="the run of this number and no other")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for logs and checkpoints, which else are removed")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    root: Path = Path(tempfile.mkdtemp()) if arguments.keep is None else arguments.keep
    total, failed = Found(parameters=0.0), False
    references: dict[tuple[str, ...], tuple[dict[int, float], dict[str, torch.Tensor]]] = {}
    print(" | ".join(COLUMNS), flush=True)
    for number in range(arguments.runs) if arguments.only is None else [arguments.only]:
        scheme, asynchronous, fewer = SCHEMES[number % len(SCHEMES)], number % 2 == 1, number % 3 == 2
        flags = words(scheme, asynchronous, arguments.steps)
        if scheme not in references:
            references[scheme] = uninterrupted(root / f"whole-{len(references)}", flags, arguments.ranks)
        plan = launches(arguments.ranks, arguments.kills, fewer)
        first = number * arguments.kills
        saves = [kill % 5 in (1, 3) for kill in range(first, first + arguments.kills)]
        folder = root / f"run-{number}"
        found = one_run(folder, flags, plan, draw, references[scheme], saves)
        failed = failed or found.failed(same_ranks=not fewer)
        print(_row(number, plan, scheme, asynchronous, found), flush=True)
        for name in ("kills", "in_saves", "redone", "lost", "compared", "unequal", "hangs", "orphans"):
            setattr(total, name, getattr(total, name) + getattr(found, name))
        total.worst, total.parameters = max(total.worst, found.worst), max(total.parameters, found.parameters)
    print(_row("all", [], None, None, total), flush=True)
    if arguments.keep is None:
        shutil.rmtree(root)
    return int(failed)


def _row(number: object, plan: list[tuple[int, int]], scheme: Any, asynchronous: bool | None, found: Found) -> str:
    ranks = " then ".join(str(ranks) for ranks, _ in plan)
    named = "" if scheme is None else "+".join(scheme) or "free"
    saves = "" if asynchronous is None else "background" if asynchronous else "at once"
    losses = f"{found.compared - found.unequal} of {found.compared} ({found.worst:.0e})"
    numbers = (found.kills, found.in_saves, found.redone, found.lost, losses, f"{found.parameters:.0e}")
    cells = (number, ranks, named, saves, *numbers, found.hangs, found.orphans)
    return " | ".join(map(str, cells)) + ("  " + "; ".join(found.notes) if found.notes else "")


if __name__ == "__main__":
    sys.exit(main())
