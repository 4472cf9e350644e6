"""Makes the modules of this folder, which ranks run, importable by the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
