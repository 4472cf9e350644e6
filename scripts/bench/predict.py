"""Compares predictions of plans with measurements of steps on real ranks on CPU (gloo).

    python scripts/bench/predict.py memory                  # all pairs, a table in Markdown
    python scripts/bench/predict.py memory gpt2 --out /tmp  # pairs whose description contains one of the words

predict_pairs.json lists the pairs of model and plan. Plans are made from models on the meta device.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import predict_memory

TABLES = {"memory": predict_memory.run}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("words", nargs="*", help="only pairs whose description has one of these")
    parser.add_argument(
        "--out", type=Path, default=Path("out/predict"), help="folder for plans and what ranks measured"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return TABLES[arguments.table](arguments.words, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
