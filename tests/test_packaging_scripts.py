"""The two commands on a machine whose Python is too old: one clear error, and nothing is created."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ["bash", "dirname", "grep", "paste", "tr"]
OLD_PYTHON = '#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.10" && exit 0\nexit 1\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without .venv, and a `bin` folder with the tools that the scripts use and an old python3."""
    shutil.copytree(ROOT / "scripts", tmp_path / "checkout" / "scripts")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    (tools / "python3").write_text(OLD_PYTHON)
    (tools / "python3").chmod(0o755)
    return tmp_path / "checkout"


@pytest.mark.parametrize("name", ["test", "demo"])
def test_too_old_a_python_is_told(checkout: Path, name: str) -> None:
    done = subprocess.run(
        ["bash", f"scripts/{name}"],
        cwd=checkout,
        env={"PATH": str(checkout.parent / "bin"), "VIRTUAL_ENV": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "autopar needs Python 3.10 or newer" in done.stderr
    assert "python3 here is Python 3.8.10" in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("name", ["test", "demo"])
def test_help_needs_no_setup(checkout: Path, name: str) -> None:
    done = subprocess.run(["bash", f"scripts/{name}", "--help"], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0
    assert f"./scripts/{name}" in done.stdout
    assert not (checkout / ".venv").exists()


def test_another_torch_has_an_environment_and_the_tests_alone(checkout: Path) -> None:
    python = checkout / ".venv-torch-9.8.7" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\nfor word; do [ -p "$word" ] && cat "$word" || echo "$word"; done >>calls\n')
    python.chmod(0o755)
    (checkout / "requirements-dev.txt").write_text("torch==1.2.3\nsomething==4\n")
    environment = {**os.environ, "AUTOPAR_TORCH": "9.8.7"}
    done = subprocess.run(
        ["bash", "scripts/test", "-k", "some"], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not (checkout / ".venv").exists()
    called = (checkout / "calls").read_text().splitlines()
    assert "torch==9.8.7" in called and "something==4" in called and "torch==1.2.3" not in called
    assert "pytest" in called and called[-2:] == ["-k", "some"]
    assert "mypy" not in called
