"""A user's folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from commands import put_users_files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a new one with a config and a user's module."""
    put_users_files(tmp_path, monkeypatch)
    return tmp_path
