"""Makes the folders of the benchmark scripts importable."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "scripts" / name) for name in ("bench", "ablation")]
