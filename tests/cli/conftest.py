"""A folder as a user has it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from commands import put_users_files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a config and a module of the user's."""
    put_users_files(tmp_path, monkeypatch)
    return tmp_path
