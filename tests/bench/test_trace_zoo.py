"""The zoo benchmark distinguishes outcomes, keeps its time limit, and resumes where it was stopped."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zoo_inputs
import zoo_models
import zoo_report
import zoo_source
import zoo_torchvision
import zoo_worker
from torch import nn

OPTIONS = {"batch": 2, "length": 16, "train": True, "cpu_seconds": 20}
SCRIPT = Path(zoo_models.__file__).with_name("trace_zoo.py")


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Asking(Whole):
    """A layer whose branch depends on the values of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.sum() > 0 else x


class Telling(Whole):
    """Its output is a number that depends on data."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        return self.inner(x), bool(x.sum() > 0)


class Leaves(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Asking()


class Unfit(Whole):
    """A model that fails on its example input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:, :3])


class Endless(Whole):
    """Catches every kind of ordinary error, and does not end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while True:
            try:
                x = self.inner(x)
            except Exception:
                raise AssertionError("the limit must not be an ordinary exception") from None


def examine(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], **options: float) -> dict:
    def build(family: str, name: str) -> tuple[nn.Module, str]:
        return kind().to("meta"), "meta"

    monkeypatch.setattr(zoo_worker, "build", build)
    monkeypatch.setattr(zoo_worker, "examples", lambda *args: iter([{"x": torch.empty(2, 4, device="meta")}]))
    return zoo_worker.examine("base", kind.__name__, OPTIONS | options)


def test_what_happens_to_a_model_is_told(monkeypatch):
    whole = examine(monkeypatch, Whole)
    assert (whole["status"], whole["leaves"], whole["parameters"]) == ("whole", [], 20)
    assert whole["nodes"] >= 4
    assert whole["peak_bytes"] > 2**26

    leaves = examine(monkeypatch, Leaves)
    assert leaves["status"] == "leaves"
    ((path, kind, why),) = leaves["leaves"]
    assert (path, kind) == ("inner", "Asking")
    assert why.startswith("UnknownDataError: bool()")

    one = examine(monkeypatch, Asking)
    assert one["status"] == "leaves"
    assert one["leaves"][0][:2] == ["forward", "forward()"]  # the whole model is the leaf
    assert one["leaves"][0][2].startswith("UnknownDataError: bool()")

    failed = examine(monkeypatch, Telling)
    assert failed["status"] == "failed"
    assert "returns numbers that depend on data" in failed["why"]

    unfit = examine(monkeypatch, Unfit)
    assert unfit["status"] == "does not run"
    assert unfit["why"] == unfit["eager"]


def test_the_next_guess_is_for_a_model_that_does_not_run(monkeypatch):
    wide, right = torch.empty(2, 5, device="meta"), torch.empty(2, 4, device="meta")
    monkeypatch.setattr(zoo_worker, "build", lambda family, name: (Whole().to("meta"), "meta"))
    monkeypatch.setattr(zoo_worker, "examples", lambda *args: iter([{"x": wide}, {"x": right}, {"x": wide}]))
    record = zoo_worker.examine("base", "Whole", OPTIONS)
    assert (record["status"], record["inputs"]) == ("whole", {"x": [2, 4]})


def test_the_time_limit_ends_a_model_that_catches_everything(monkeypatch):
    record = examine(monkeypatch, Endless, cpu_seconds=0.5)
    assert (record["status"], record["why"]) == ("failed", "more than 0.5 CPU seconds")
    assert examine(monkeypatch, Whole)["status"] == "whole", "nothing of it stays"


def test_a_default_config_that_gives_no_model_is_told(monkeypatch):
    def make(family, name):
        raise ValueError("no default for vocab_size")

    monkeypatch.setattr(zoo_models, "_make", make)
    record = zoo_worker.examine("base", "Nameless", OPTIONS)
    assert record["status"] == "not built"
    assert record["why"] == "ValueError: no default for vocab_size"


@pytest.mark.parametrize("name", ["BertForMaskedLM", "ViTForImageClassification", "WhisperModel", "T5Model"])
def test_examples_fit_models_of_every_modality(name):
    import transformers

    family = {"BertForMaskedLM": "masked-lm", "ViTForImageClassification": "image-classification"}.get(name, "base")
    with torch.device("meta"):
        architecture = getattr(transformers, name)
        model = architecture(architecture.config_class())
    given = next(zoo_inputs.examples(family, model, 2, 64))
    assert {zoo_worker.shape(value)[0] for value in given.values()} == {2}
    assert ("labels" in given) == (family != "base")
    record = zoo_worker.traced(model, given, 60)
    assert record["status"] == "whole", record


def test_every_family_of_transformers_is_listed_once():
    for family in zoo_models.TRANSFORMERS:
        names = zoo_models.architectures(family)
        assert len(names) == len(set(names)) > 10


def record(name: str, status: str, **more: object) -> dict:
    return {"family": "causal-lm", "name": name, "status": status, **more}


def test_the_report_counts_and_names_no_folder_of_the_machine(tmp_path):
    traced = {"nodes": 1200, "seconds": 0.5, "peak_bytes": 2**30, "parameters": 7}
    lines = [
        record("Changed", "failed", why="an older run"),
        record("Changed", "whole", leaves=[], **traced),
        record("Leafy", "leaves", leaves=[["a.0", "Gate", "UnknownDataError: tolist()"]], **traced),
        record(
            "Odd", "failed", why="KeyError: 'x' [at /home/me/.venv/site-packages/transformers/odd.py:3]", seconds=1.0
        ),
        record("Cannot", "does not run", why="TypeError: k", seconds=0.1),
        record("Nameless", "not built", why="ValueError: size"),
    ]
    out = tmp_path / "zoo.jsonl"
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    zoo_report.write_report(zoo_report.last_records(out), tmp_path / "table", ["A note."])
    text = (tmp_path / "table.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| AutoModelForCausalLM |"))
    assert [cell.strip() for cell in row.split("|")[2:10]] == ["5", "4", "1", "1", "1", "0", "1", "33.3 %"]
    assert "1 × Gate" in text
    assert "transformers/odd.py:3" in text
    assert "/home/me" not in text
    with (tmp_path / "table.csv").open() as file:
        rows = {row["architecture"]: row for row in csv.DictReader(file)}
    assert rows["Leafy"]["leaves"] == "Gate"
    assert rows["Changed"]["status"] == "whole"


def test_the_report_tells_which_tracer_its_rows_are_of():
    records = [record("A", "whole", source="1f", date="2026-01-02")] * 2 + [record("B", "whole")]
    told = zoo_source.told(records, zoo_source.TRACER)
    assert told.startswith("Records: 2 of 1f on 2026-01-02, 1 of unknown on unknown (") and "autopar/tracing" in told
    assert len(zoo_source.source(zoo_source.TRACER)) == 8


def test_boxes_are_suppressed_by_better_ones_that_are_kept():
    """The substitute for torchvision's operator, without its compiled extension, against the definition."""

    def overlap(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        sides = torch.minimum(first[2:], second[2:]) - torch.maximum(first[:2], second[:2])
        areas = [(box[2:] - box[:2]).prod() for box in (first, second)]
        shared = sides.clamp(min=0).prod()
        return shared / (areas[0] + areas[1] - shared)

    torch.manual_seed(0)
    low, scores = 10 * torch.rand(60, 2).double(), torch.rand(60)
    boxes = torch.cat([low, low + 0.1 + 4 * torch.rand(60, 2)], 1)
    kept: list[int] = []
    for number in scores.argsort(descending=True).tolist():
        if all(overlap(boxes[number], boxes[better]) <= 0.3 for better in kept):
            kept.append(number)
    assert zoo_torchvision._best_boxes(boxes, scores, 0.3).tolist() == kept
    assert 0 < len(kept) < 60


@pytest.mark.slow
def test_the_script_goes_on_where_it_was_stopped(tmp_path):
    out = tmp_path / "zoo.jsonl"
    out.write_text(json.dumps(record("GPT2LMHeadModel", "failed", why="an older run")) + "\n")

    def run(*words: str) -> list[dict]:
        command = [sys.executable, str(SCRIPT), "causal-lm", "--only", "GPT2", "--out", str(out), *words]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        return [json.loads(line) for line in out.read_text().splitlines()]

    assert len(run()) == 1, "what has a record is not run"
    again = run("--again", "failed")
    assert [entry["status"] for entry in again] == ["failed", "whole"]
    assert again[-1].keys() >= {"source", "date"}
    assert run("--again", "old") == again, "it is of this tracer"
    out.write_text(json.dumps(again[-1] | {"source": "another"}) + "\n")
    assert [entry["source"] for entry in run("--again", "old")] == ["another", again[-1]["source"]]
