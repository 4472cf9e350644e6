"""Measures the CPU seconds of the whole executed check: every rule of the table, and rules on generated arguments.

python tests/strategies/seconds.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

FILES = ("test_rules.py", "test_generated_arguments.py", "test_wrong_rules.py", "test_registering.py")


def main() -> int:
    torch.set_num_threads(1)
    folder = Path(__file__).parent
    failed = pytest.main(["-q", "-p", "no:cacheprovider", *(str(folder / name) for name in FILES)])
    spent = os.times()
    seconds = spent.user + spent.system + spent.children_user + spent.children_system
    print(f"{seconds:.0f} CPU seconds, imports included")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
