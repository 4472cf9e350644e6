"""The pictures of the documentation are those that its script draws now."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"


def test_every_picture_is_shown_and_told() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    shown = re.findall(r"^```\{image\} pictures/(\S+)\n:alt: \S+", pages, re.MULTILINE)
    assert sorted(shown) == sorted(path.name for path in PICTURES.iterdir())


@pytest.mark.slow
def test_the_script_draws_them(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "draw_docs.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in PICTURES.iterdir()}
