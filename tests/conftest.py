"""For all tests: one thread each, and what is discovered while they run stays theirs."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Looked through for doctests it would be another module, whose operators take the place of those that tests have.
collect_ignore = ["shared/writing_operators.py"]

# Tensors are small here, and pytest runs several processes: threads that wait for work only take time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine takes longer for one example than hypothesis allows by itself.
hypothesis.settings.register_profile("without deadlines", deadline=None)
hypothesis.settings.load_profile("without deadlines")


@pytest.fixture(scope="session", autouse=True)
def _own_discoveries() -> Iterator[None]:
    """Also for the processes that tests start."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if "AUTOPAR_DISCOVERY_CACHE" not in os.environ:
            patch.setenv("AUTOPAR_DISCOVERY_CACHE", str(Path(folder) / "discovered.json"))
        yield
