"""The README's blocks run: its Python blocks on two ranks, its commands like those of the documentation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from pages import ROOT, in_a_shell, run_page

BLOCKS = Path(__file__).parent / "readme_blocks.py"
# instead of eight processes for twenty seconds
QUICK = {"autopar profile --mesh 2x4": "autopar profile --mesh 2 --seconds 2"}


def test_blocks_of_python_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = in_a_shell(f"torchrun --standalone --nproc-per-node 2 --local-ranks-filter 0 {BLOCKS}")
    count = (ROOT / "README.md").read_text().count("```python\n")
    assert count >= 7
    assert printed.splitlines()[-1] == f"{count} blocks"


@pytest.mark.slow
def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text()
    for theirs, ours in QUICK.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    text = text.replace("```python\n", "```py\n")  # Python blocks are run by the other test
    (tmp_path / "README.md").write_text(text)
    monkeypatch.chdir(tmp_path)
    blocks, printed = run_page(tmp_path / "README.md")
    assert blocks == text.count("```bash\n") + text.count("```text\n") + 2 == 7  # two more blocks are skipped
    assert len(printed) >= 9
    for file in ("plan.json", "report.html", "cluster.json", "step.json"):
        assert (tmp_path / file).is_file()
