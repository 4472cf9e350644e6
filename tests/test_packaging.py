"""Wheel, sdist and a plain checkout give the same packages under the same names."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import autopar

ROOT = Path(__file__).resolve().parent.parent
MODEL = """
import torch

class Mean(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).mean()

def model():
    return Mean(8, 8), {"x": torch.empty(4, 8)}
"""


def _modules(folder: Path) -> set[str]:
    """The modules of autopar that a wheel must hold, including those of the linked folders strategies/ and solver/."""
    found: set[str] = set()
    for where, folders, files in os.walk(folder / "autopar", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found |= {os.path.relpath(os.path.join(where, file), folder) for file in files if file.endswith(".py")}
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist built from this tree, and a wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def test_wheel_holds_every_module_once(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    assert {name for name in names if name.endswith(".py")} == _modules(ROOT)
    assert "autopar/py.typed" in names
    templates = {f"autopar/report/templates/{file.name}" for file in (ROOT / "autopar/report/templates").iterdir()}
    assert len(templates) >= 4 and templates <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_holds_the_tests_and_what_they_need(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {"LICENSE", "README.md", "strategies/strategy.py", "solver/__init__.py", "tests/test_packaging.py"} <= names
    assert {"scripts/test", "requirements-dev.txt", "CITATION.cff", "SECURITY.md"} <= names
    assert {"docs/conf.py", "docs/start.md", "docs/pictures/layouts.svg", "examples/first/plain.py"} <= names


def test_wheel_imports_outside_the_checkout(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "import autopar, autopar.strategies, autopar.solver; print(autopar.__file__, autopar.strategies.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert all(path.startswith(str(tmp_path / "site")) for path in done.stdout.split())


@pytest.mark.slow
def test_wheel_plans_and_reports_outside_the_checkout(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "mine.py").write_text(MODEL)
    words = ["--mesh", "2", "--cluster", "cpu"]
    for command in (["plan", "mine:model", *words, "--out", "plan.json"], ["report", "plan.json", "-o", "report.html"]):
        done = subprocess.run(
            [sys.executable, "-m", "autopar.cli", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert "certificate" in (tmp_path / "report.html").read_text()


def test_the_version_is_told_once_and_cited(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name.startswith(f"autopar-{autopar.__version__}-")
    assert f"version: {autopar.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {autopar.__version__} " in (ROOT / "CHANGELOG.md").read_text()
    assert autopar.__version__ not in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", ["strategies", "solver"])
def test_the_wrong_import_names_the_right_one(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ImportError: import this package as autopar.{name}" in done.stderr


def test_both_links_are_links() -> None:
    for name in ("strategies", "solver"):
        assert os.readlink(ROOT / "autopar" / name) == f"../{name}"
