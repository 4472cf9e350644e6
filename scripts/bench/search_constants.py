"""What each constant of the search is worth: plans with one constant at a time halved and doubled.

python scripts/bench/search_constants.py                     # all constants of solver/search and solver/linear
python scripts/bench/search_constants.py BUDGET_MARGIN FLOWS  # constants whose name contains one of the words

Two problems whose budgets bind, on an H100 preset: GPT-2 on (2, 4) within 4 GiB, and Llama-3-8B on (8, 8) within 20
GiB. `cpu s`: CPU seconds of the solve; `step`: the predicted step relative to that with the constant as it is. Shares
of the time limit and limits in seconds bind in neither problem, so this says nothing about them. A quarter of an hour
of CPU time for all.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from autopar import Cluster
from autopar.planning.stages import Prepared, prepare, request_of
from autopar.report.tables import table
from autopar.sources import load_source
from autopar.stopwatch import Stopwatch
from autopar.tracing import trace

PROBLEMS = ("gpt2", (2, 4), 32, 1024, "4GiB"), ("llama-3-8b", (8, 8), 64, 4096, "20GiB")
PACKAGES = "autopar.solver.search", "autopar.solver.linear"
_CONSTANT = re.compile(r"^((?:_?[A-Z][A-Z_]+(?:, )?)+) = ", re.MULTILINE)
_FIXED = {"EPSILON", "_EPSILON", "INTEGRALITY", "_AGGREGATOR_BIT"}  # tolerances of arithmetic, and HiGHS's own numbers


def modules() -> list[ModuleType]:
    """The modules of the search and of integer programs."""
    folders = [importlib.import_module(package) for package in PACKAGES]
    names = [f"{folder.__name__}.{found.name}" for folder in folders for found in pkgutil.iter_modules(folder.__path__)]
    return [importlib.import_module(name) for name in names]


def constants() -> Iterator[tuple[ModuleType, str, Any]]:
    """Each constant that is a number or several, with the module that defines it."""
    for module in modules():
        assert module.__file__ is not None
        for match in _CONSTANT.finditer(Path(module.__file__).read_text()):
            for name in match[1].split(", "):
                value = getattr(module, name)
                numbers = value if isinstance(value, tuple) else (value,)
                if name not in _FIXED and all(type(number) in (int, float) for number in numbers):
                    yield module, name, value


def scaled(value: Any, factor: float) -> Any:
    """The value times a factor; whole numbers stay whole and at least 1.

    >>> scaled((4, 0.5, float("inf")), 0.5), scaled(1, 0.5)
    ((2, 0.25, inf), 1)
    """
    if isinstance(value, tuple):
        return tuple(scaled(number, factor) for number in value)
    return max(1, round(value * factor)) if isinstance(value, int) else value * factor


def users_of(module: ModuleType, name: str) -> list[ModuleType]:
    """The modules in which a constant has to be replaced: its own, and those that import it by name."""
    importing = re.compile(rf"^from {re.escape(module.__name__)} import .*\b{name}\b", re.MULTILINE)
    texts = {other: Path(str(other.__file__)).read_text() for other in modules()}
    return [module, *(other for other, text in texts.items() if importing.search(text))]


def prepared(name: str, mesh: tuple[int, ...], batch: int, sequence: int, memory: str) -> Prepared:
    source = load_source(name, batch=batch, sequence=sequence)
    request = request_of(Cluster.preset("h100", mesh), memory)
    traced = trace(source.model, source.meta_args, parameter_dtype=torch.bfloat16)
    return prepare(source.model, traced, request, Stopwatch())


def measured(problems: list[Prepared]) -> list[tuple[float, float]]:
    """CPU seconds of each solve, and the predicted seconds of a step."""
    results = []
    for problem in problems:
        begun = time.process_time()
        plan = problem.solve()
        results.append((time.process_time() - begun, plan.predicted.step_seconds))
    return results


def main(words: list[str]) -> None:
    problems = [prepared(*problem) for problem in PROBLEMS]
    usual = measured(problems)
    rows = [["constant", "times", *(text for name, *_ in PROBLEMS for text in (f"{name}: cpu s", "step"))]]
    rows += [["as they are", "", *(text for seconds, _ in usual for text in (f"{seconds:.1f}", ""))]]
    for module, name, value in constants():
        if words and not any(word in name for word in words):
            continue
        for factor in (0.5, 2.0):
            replaced = [(user, getattr(user, name)) for user in users_of(module, name)]
            for user, _ in replaced:
                setattr(user, name, scaled(value, factor))
            try:
                results = measured(problems)
            finally:
                for user, before in replaced:
                    setattr(user, name, before)
            figures = [
                text
                for (seconds, step), (_, before) in zip(results, usual, strict=True)
                for text in (f"{seconds:.1f}", "same" if math.isclose(step, before) else f"{step / before:.4f}")
            ]
            rows.append([f"{module.__name__.rpartition('.')[2]}.{name}", f"{factor:g}", *figures])
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    print("\n".join(table(rows, "<>" + ">>" * len(PROBLEMS))))


if __name__ == "__main__":
    main(sys.argv[1:])
