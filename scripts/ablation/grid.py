"""The runs of a grid: planned cases (model x mesh x budget) with a feature off, and features measured on ranks.

A grid is a JSON file with a list of entries. Planned runs are all combinations of four lists::

    {"models": ["llama-3-8b"], "meshes": [[8], [8, 8]], "budgets": ["70GiB"], "features": ["recompute", "joint"],
     "preset": "h100"}

Measured runs use processes on this host with gloo::

    {"measured": ["overlap", "zero"], "model": "gpt2-small", "ranks": 2, "pairs": 10}

Models are those of `ablated_models.py`; "llama-3-8b/4" is the model with 4 layers. Features are those of `features.py`
and `measured.py`; "all" stands for every one. A feature for which a mesh has too few axes is skipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BASE = "nothing off"
Group = tuple[str, str, tuple[int, ...], str]
NEEDS_TWO_AXES = ("one-axis", "zero-across")


@dataclass(frozen=True)
class Run:
    """One line of the results: a case and the feature that is off. If it is measured, `mesh` holds its ranks."""

    kind: str  # "planned" or "measured"
    model: str
    mesh: tuple[int, ...]
    budget: str
    feature: str
    preset: str = ""
    pairs: int = 0

    @property
    def key(self) -> str:
        """Identifies the run in the results."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def group(self) -> Group:
        """Equal for runs that share a trace."""
        return self.kind, self.model, self.mesh, self.preset

    @property
    def devices(self) -> int:
        return math.prod(self.mesh)


def read_grid(path: Path, planned: Sequence[str], measured: Sequence[str]) -> list[Run]:
    """The runs of a grid without duplicates, ordered by group; `planned` and `measured`: the known features.

    Raises SystemExit for an invalid file.
    """
    try:
        entries = json.loads(path.read_text())
        runs = dict.fromkeys(run for entry in entries for run in _runs(entry, planned, measured))
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is no grid: {type(error).__name__} {error}; grid.py says what one is") from error
    groups: dict[Group, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    return [run for group in groups.values() for run in group]


def _runs(entry: Mapping[str, Any], planned: Sequence[str], measured: Sequence[str]) -> Iterator[Run]:
    if "measured" in entry:
        for feature in _named(entry["measured"], measured):
            yield Run("measured", entry["model"], (entry["ranks"],), "", feature, pairs=entry["pairs"])
        return
    for model in entry["models"]:
        for mesh in map(tuple, entry["meshes"]):
            for budget in entry["budgets"]:
                for feature in (BASE, *_named(entry["features"], planned)):
                    if len(mesh) > 1 or feature not in NEEDS_TWO_AXES:
                        yield Run("planned", model, mesh, budget, feature, entry["preset"])


def _named(wanted: Sequence[str] | str, known: Sequence[str]) -> Sequence[str]:
    if wanted == "all":
        return known
    unknown = [name for name in wanted if name not in known]
    if isinstance(wanted, str) or unknown:
        raise SystemExit(f"{wanted!r} is no list of features: known are {', '.join(known)}")
    return wanted
