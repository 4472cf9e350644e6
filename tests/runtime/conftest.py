"""The files that ranks run are modules of this folder, for the tests as for the ranks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
