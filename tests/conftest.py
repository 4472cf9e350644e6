"""For all tests: one thread per process, and rules discovered during a run are not kept for later ones."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Collecting doctests would import it a second time, and its operators would replace those that the tests use.
collect_ignore = ["shared/writing_operators.py"]

# Tensors are small and pytest runs several processes, so more threads would only compete for the CPU.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine takes longer for one example than hypothesis allows by itself.
hypothesis.settings.register_profile("without deadlines", deadline=None)
hypothesis.settings.load_profile("without deadlines")


@pytest.fixture(scope="session", autouse=True)
def _own_discoveries() -> Iterator[None]:
    """Also for processes that tests start, through the environment."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if "AUTOPAR_DISCOVERY_CACHE" not in os.environ:
            patch.setenv("AUTOPAR_DISCOVERY_CACHE", str(Path(folder) / "discovered.json"))
        yield
