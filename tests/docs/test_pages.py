"""Every code block of the documentation runs, and every message that it quotes is one of autopar's."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from messages import messages
from pages import DOCS, PAGES, ROOT, in_a_shell, run_page

from autopar import Cluster
from autopar.strategies.table import REGISTERED

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


LAUNCHES = pytest.mark.slow  # pages that start processes several times; the README, with two ranks, is not slow
SLOW = {"checkpoints", "coming_from", "large", "start"}
TRAINING = {"start", "checkpoints"}  # pages whose scripts train the model of plain.py


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files that pages refer to: the examples, a config, a measured cluster."""
    for script in (ROOT / "examples" / "first").glob("*.py"):
        shutil.copy(script, tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    Cluster.preset("cpu", (2,)).save(tmp_path / "cluster.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    before = dict(REGISTERED)
    yield tmp_path
    REGISTERED.clear()  # the page on rules registers some
    REGISTERED.update(before)


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.stem, marks=[LAUNCHES] if p.stem in SLOW else []) for p in PAGES]
)
def test_code_blocks_run(page: Path, reader: Path) -> None:
    text = page.read_text()
    blocks, printed = run_page(page)
    assert blocks >= len(re.findall(r"^```(bash|python|text)$", text, re.MULTILINE))
    trained = {line: losses for line, told in printed.items() if (losses := _losses(told))}
    assert bool(trained) == (page.stem in TRAINING)
    if trained:
        _one_run(trained)
    assert len(_compared_pairs(reader)) == (3 if page.stem == "coming_from" else 0)


def _compared_pairs(folder: Path) -> list[str]:
    """The systems that readers come from; checks that each one's weights equal those of the equivalent plan."""
    systems = [path.stem.removeprefix("planned_") for path in folder.glob("planned_*.pt")]
    for name in systems:
        theirs, ours = (torch.load(folder / f"{way}_{name}.pt") for way in ("with", "planned"))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, msg=lambda told, name=name: f"{name}: {told}")
        assert all(weight.dtype == torch.float32 for weight in ours.values())
    return systems


def _losses(printed: str) -> dict[str, float]:
    words = [line.split() for line in printed.splitlines() if line.startswith("step ")]
    return {step: float(loss) for _, step, _, loss in words}


def _one_run(trained: dict[str, dict[str, float]]) -> None:
    """Check that all ways of training the example's model have the losses of one plain process, step by step."""
    alone = trained.get("python plain.py") or _losses(in_a_shell(f"{sys.executable} plain.py"))
    assert len(alone) == 8
    for line, losses in trained.items():
        assert losses == {step: pytest.approx(alone[step], abs=2e-4) for step in losses}, line
    assert {step for losses in trained.values() for step in losses} == alone.keys()


def test_quoted_messages_are_in_the_source() -> None:
    quoted = re.findall(r"^\*\*`(.+)`\*\*$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted) > 20
    known = [message.replace("`", "") for message in messages(ROOT)]
    for quote in quoted:
        parts = [part.strip() for part in quote.replace("`", "").split("…")]
        assert any(in_order(parts, message) for message in known), f"nothing in the source says {quote!r}"


def test_the_index_of_messages_leads_to_them() -> None:
    index, *sections = re.split(r"^## ", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    quoted = {re.sub(r"\W+", "-", s.split("\n")[0].lower()): re.findall(r"^\*\*`(.+)`\*\*$", s, re.M) for s in sections}
    rows = [line.split(" | ")[1:] for line in index.splitlines() if "](#" in line]
    for places, words in rows:
        anchors = re.findall(r"\(#(.+?)\)", places)
        known = [quote for anchor in anchors for quote in quoted[anchor]]
        for word in re.findall(r"`(.+?)`", words):
            assert any(word in quote for quote in known), f"nothing under {places} says {word!r}"
    assert {anchor for places, _ in rows for anchor in re.findall(r"\(#(.+?)\)", places)} == quoted.keys()


def in_order(parts: list[str], text: str) -> bool:
    """Whether the text contains all parts in this order."""
    place = 0
    for part in parts:
        place = text.find(part, place) + len(part)
        if place < len(part):
            return False
    return True
