"""Plans the architectures of the zoo at full size, without memory for weights, one line each.

python scripts/bench/plan_zoo.py causal-lm --every 4      # a sample; goes on where it was stopped
python scripts/bench/plan_zoo.py causal-lm --only Llama --mesh 8 --mesh 2x4
python scripts/bench/plan_zoo.py --report docs/results/plan_zoo    # no planning: a .md of what --out holds

Each line of --out (JSON): status (planned | failed | not traced | not built), ops, shares of the FLOPs of a step that
are under a rule, under a discovered one, under none, that can be split on an index from dim 0 of an input and on one
that is from no input (heads, features, experts), and for each mesh the unconstrained plan: the share of FLOPs that
every device does, the gap, CPU seconds. Devices are H100s; memory is taken to be enough.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trace_zoo import Worker
from zoo_models import FAMILIES, architectures, title
from zoo_report import last_records

from autopar.report.tables import table
from autopar.sizes import parse_bytes

Record = Mapping[str, Any]
# What issue 4 asks of the zoo: name, the figure of a record, and what counts as enough.
GOALS: tuple[tuple[str, Callable[[Record], bool]], ...] = (
    ("ruled", lambda r: r["under_rule"] + r["discovered"] >= 0.99),
    ("on batch", lambda r: r["on_batch"] >= 0.95),
    ("on inner", lambda r: r["on_inner"] >= 0.90),
)
HEAD = ["family", "run", "planned", "failed", "not traced", "not built", "ruled", "on batch", "on inner"]
HEAD += ["median replicated", "most", "median CPU s", "most CPU s"]


LEGEND = (
    "ruled: at least 99 % of the FLOPs under a rule, discovered ones among them; on batch: at least 95 % can be split",
    "on an index from dim 0 of an input; on inner: at least 90 % on one from no input (heads, features, experts).",
    "replicated: FLOPs that every device does in the plan on the first mesh.",
)


class Planner(Worker):
    """A process that plans."""

    script = "plan_worker.py"


def rows(records: Iterable[Record]) -> list[list[str]]:
    """A row a family: how many architectures reach each goal, and what the first mesh's plans come to."""
    found = []
    for family in FAMILIES:
        mine = [r for r in records if r["family"] == family]
        if not mine:
            continue
        count = collections.Counter(r["status"] for r in mine)
        ruled = [r for r in mine if "under_rule" in r]
        plans = [next(iter(r["plans"].values())) for r in mine if r["status"] == "planned"]
        whole, seconds = [p["replicated"] for p in plans], [p["cpu_seconds"] for p in plans]
        goals = [f"{sum(map(goal, ruled))}/{len(ruled)}" for _, goal in GOALS]
        states = [str(count[s]) for s in ("planned", "failed", "not traced", "not built")]
        figures = [f"{100 * f(whole):.2f} %" for f in (statistics.median, max)] if plans else ["", ""]
        figures += [f"{f(seconds):.1f}" for f in (statistics.median, max)] if plans else ["", ""]
        found.append([title(family), str(len(mine)), *states, *goals, *figures])
    return found


def without_rule(records: Iterable[Record], key: str) -> list[list[str]]:
    """Ops by the number of architectures that they occur in."""
    holders: dict[str, list[str]] = {}
    for record in records:
        for op in record.get(key, {}):
            holders.setdefault(op, []).append(record["name"])
    ranked = sorted(holders.items(), key=lambda pair: -len(pair[1]))
    return [[op, str(len(names)), ", ".join(names[:4])] for op, names in ranked]


def report(records: list[Record], notes: list[str]) -> list[str]:
    """The whole table as Markdown."""
    lines = ["# The zoo, planned", "", *notes, ""]
    lines += _markdown(HEAD, rows(records))
    lines += ["", *LEGEND]
    for key, name in (("ops_without", "Ops without a rule"), ("discovered_ops", "Ops whose rule was discovered")):
        lines += ["", f"## {name}", "", *_markdown(["op", "architectures", "such as"], without_rule(records, key))]
    failed = [
        [r["name"], r["status"], r.get("why", "")[:160]] for r in records if r["status"] in ("failed", "not traced")
    ]
    lines += ["", "## Not planned", "", *_markdown(["architecture", "status", "why"], failed)]
    short = [r for r in records if "under_rule" in r and not all(goal(r) for _, goal in GOALS)]
    shares = ("under_rule", "discovered", "none", "on_batch", "on_inner")
    each = [[r["name"], *(f"{100 * r[share]:.1f} %" for share in shares)] for r in short]
    lines += ["", "## Short of a goal", "", *_markdown(["architecture", *shares], each)]
    return lines


def _markdown(head: list[str], cells: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]


def told(record: Record, number: int, of: int) -> str:
    """A record as one line for people."""
    shares = [f"{key} {record[key]:.3f}" for key in ("under_rule", "on_batch", "on_inner") if key in record]
    plans = [f"{mesh}: {plan}" for mesh, plan in record.get("plans", {}).items()]
    return "  ".join(
        [f"[{number}/{of}]", record["name"], record["status"], record.get("why", "")[:120], *shares, *plans]
    )


def _mesh(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("x"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--only", metavar="WORD", help="architectures whose name contains it")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each Nth architecture of a family: a sample")
    parser.add_argument("--mesh", type=_mesh, action="append", help="8, 2x4, ...; several are planned one by one")
    parser.add_argument("--out", type=Path, default=Path("out/plan_zoo.jsonl"), help="records, added to what is there")
    parser.add_argument("--again", action="append", default=[], metavar="STATUS", help="do these once more")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens of text, at most what a config allows")
    parser.add_argument(
        "--cpu-seconds", type=float, default=60, help="limit of a trace with its strategies, and of a plan"
    )
    parser.add_argument("--memory", default="8GiB", help="limit of the worker's data")
    parser.add_argument("--report", type=Path, metavar="PATH", help="write PATH.md from --out, and stop")
    parser.add_argument("--note", action="append", default=[], help="a sentence for the head of the report")
    given = parser.parse_args()
    if wrong := set(given.families) - set(FAMILIES):
        parser.error(f"no family is called {', '.join(sorted(wrong))}; there are {', '.join(FAMILIES)}")
    records = last_records(given.out)
    if given.report:
        given.report.with_suffix(".md").write_text("\n".join(report(list(records.values()), given.note)) + "\n")
        return
    options = {
        "batch": given.batch,
        "length": given.length,
        "cpu_seconds": given.cpu_seconds,
        "memory_bytes": parse_bytes(given.memory),
        "meshes": given.mesh or [(8,)],
    }
    todo = []
    for family in given.families or FAMILIES:
        try:
            names = architectures(family)[:: given.every]
        except ImportError as error:
            print(f"{family}: left out, {error}", file=sys.stderr)
            continue
        for name in names:
            old = records.get((family, name))
            if (not given.only or given.only in name) and (old is None or old["status"] in given.again):
                todo.append((family, name))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    worker = Planner(options, wall_seconds=20 * given.cpu_seconds)
    start = time.perf_counter()
    try:
        with given.out.open("a", buffering=1) as out:
            for number, (family, name) in enumerate(todo, 1):
                record = worker.record(family, name)
                records[family, name] = record
                out.write(json.dumps(record) + "\n")
                print(told(record, number, len(todo)), flush=True)
    finally:
        worker.stop()
    print(f"\n{len(todo)} architectures in {time.perf_counter() - start:.0f} s\n")
    print(*table(rows(records.values()), "<" + ">" * (len(HEAD) - 1), head=HEAD, indent=0), sep="\n")
    print(
        *table(without_rule(records.values(), "ops_without"), "<><", head=["op without a rule", "in", ""], indent=0),
        sep="\n",
    )


if __name__ == "__main__":
    main()
