"""Plans the architectures of the zoo at full size on the meta device; one line of JSON each.

python scripts/bench/plan_zoo.py causal-lm --every 4      # a sample; skips those that --out holds
python scripts/bench/plan_zoo.py causal-lm --only Llama --mesh 8 --mesh 2x4
python scripts/bench/plan_zoo.py --report out/plan_zoo    # only writes a .md of the records in --out

Each line of --out (JSON): the status (planned | failed | not traced | not built); the number of ops; shares of a step's
FLOPs in ops with a rule, with a discovered rule and without a rule, in ops that can be split on an index from dim 0 of
an input, and in ops that can be split on an index from no input (heads, features, experts); and for the plan without
constraints on each mesh, the share of FLOPs that every device computes, the gap and the CPU seconds. Devices are H100s
with enough memory.
"""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown_tables import markdown
from zoo_models import FAMILIES, architectures, one_of_each_kind, title
from zoo_report import last_records
from zoo_source import PLANNER
from zoo_source import told as sources_told
from zoo_sweep import parse, parser_of, sweep

from autopar.report.tables import table

Record = Mapping[str, Any]
# The goals of issue 4: name, and whether a record reaches it.
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


def rows(records: Iterable[Record]) -> list[list[str]]:
    """One row per family: how many architectures reach each goal, and figures of the plans on the first mesh."""
    lines = []
    for family in FAMILIES:
        of_family = [r for r in records if r["family"] == family]
        if not of_family:
            continue
        count = collections.Counter(r["status"] for r in of_family)
        ruled = [r for r in of_family if "under_rule" in r]
        plans = [next(iter(r["plans"].values())) for r in of_family if r["status"] == "planned"]
        whole, seconds = [p["replicated"] for p in plans], [p["cpu_seconds"] for p in plans]
        goals = [f"{sum(map(goal, ruled))}/{len(ruled)}" for _, goal in GOALS]
        states = [str(count[s]) for s in ("planned", "failed", "not traced", "not built")]
        figures = [f"{100 * f(whole):.2f} %" for f in (statistics.median, max)] if plans else ["", ""]
        figures += [f"{f(seconds):.1f}" for f in (statistics.median, max)] if plans else ["", ""]
        lines.append([title(family), str(len(of_family)), *states, *goals, *figures])
    return lines


DECODERS = ("causal-lm", "seq2seq-lm", "speech-seq2seq")


def goals(records: Iterable[Record]) -> list[list[str]]:
    """The goals of issue 4, and how many of the traced architectures reach each."""
    listed = list(records)
    ruled = [r for r in listed if "under_rule" in r]
    tests = dict(GOALS)
    both = [r for r in ruled if tests["ruled"](r) and tests["on batch"](r)]
    decoders = [r for r in ruled if r["family"] in DECODERS]
    inner = [r for r in decoders if tests["on inner"](r)]
    whole = [next(iter(r["plans"].values()))["replicated"] for r in listed if r["status"] == "planned"]
    failed = sum(r["status"] == "failed" for r in listed)

    def share(part: Sequence[Any], of: Sequence[Any]) -> str:
        return f"{len(part)} of {len(of)} ({100 * len(part) / max(len(of), 1):.1f} %)"

    return [
        ["99 % of the FLOPs under a rule or discovered, and 95 % split on a batch-like index", share(both, ruled)],
        ["decoders: 90 % of the FLOPs split on heads, features or experts too", share(inner, decoders)],
        ["median of the FLOPs that the plan leaves replicated", f"{100 * statistics.median(whole or [0]):.2f} %"],
        ["traced, and no plan within the limits", f"{failed} of {failed + len(whole)}"],
    ]


def on_mesh(records: Iterable[Record]) -> list[list[str]]:
    """One row per architecture with its plans on each mesh."""
    cells = []
    for record in records:
        for mesh, plan in record.get("plans", {}).items():
            planned = "replicated" in plan
            figures = [f"{plan['replicated']:.4g}", f"{plan['gap']:.4g}"] if planned else [plan["why"][:60], ""]
            cells.append([record["name"], mesh, *figures, f"{plan['cpu_seconds']:.1f}"])
        if "plans" not in record:
            cells.append([record["name"], "", record["status"], record.get("why", "")[:100], ""])
    return cells


def without_rule(records: Iterable[Record], key: str) -> list[list[str]]:
    """Ops listed under `key`, by the number of architectures in which they occur."""
    holders: dict[str, list[str]] = {}
    for record in records:
        for op in record.get(key, {}):
            holders.setdefault(op, []).append(record["name"])
    ranked = sorted(holders.items(), key=lambda pair: -len(pair[1]))
    return [[op, str(len(names)), ", ".join(names[:4])] for op, names in ranked]


def report(records: list[Record], notes: list[str], others: Sequence[Sequence[Record]] = ()) -> list[str]:
    """The whole table as Markdown; `others` are records of further meshes."""
    lines = ["# The zoo, planned", "", *notes, sources_told([*records, *itertools.chain(*others)], PLANNER), ""]
    lines += markdown(["wanted", "reached by"], goals(records))
    lines += ["", *markdown(HEAD, rows(records))]
    lines += ["", *LEGEND]
    for other in others:
        cells = on_mesh(other)
        lines += ["", f"## On {cells[0][1] if cells else 'another mesh'}", ""]
        lines += markdown(["architecture", "mesh", "replicated", "gap", "CPU s"], cells)
    for key, name in (("ops_without", "Ops without a rule"), ("discovered_ops", "Ops whose rule was discovered")):
        lines += ["", f"## {name}", "", *markdown(["op", "architectures", "such as"], without_rule(records, key))]
    failed = [
        [r["name"], r["status"], r.get("why", "")[:160]] for r in records if r["status"] in ("failed", "not traced")
    ]
    lines += ["", "## Not planned", "", *markdown(["architecture", "status", "why"], failed)]
    short = [r for r in records if "under_rule" in r and not all(goal(r) for _, goal in GOALS)]
    shares = ("under_rule", "discovered", "none", "on_batch", "on_inner")
    short_rows = [[r["name"], *(f"{100 * r[share]:.1f} %" for share in shares)] for r in short]
    lines += ["", "## Short of a goal", "", *markdown(["architecture", *shares], short_rows)]
    return lines


def told(record: Record, number: int, of: int) -> str:
    """A record as one line of text."""
    shares = [f"{key} {record[key]:.3f}" for key in ("under_rule", "on_batch", "on_inner") if key in record]
    plans = [f"{mesh}: {plan}" for mesh, plan in record.get("plans", {}).items()]
    return "  ".join(
        [f"[{number}/{of}]", record["name"], record["status"], record.get("why", "")[:120], *shares, *plans]
    )


def _mesh(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("x"))


def main() -> None:
    parser = parser_of(__doc__, Path("out/plan_zoo.jsonl"), batch=16)
    parser.add_argument("--mesh", type=_mesh, action="append", help="8, 2x4, ...; several are planned one by one")
    parser.add_argument("--kinds", action="store_true", help="of timm, one architecture of each of its modules")
    parser.add_argument("--listed", type=Path, metavar="FILE", help="those whose names are in this file, one a line")
    parser.add_argument("--gap", type=float, default=1e-3, help="how far from the optimum a plan may be, relatively")
    parser.add_argument("--also", type=Path, action="append", default=[], help="records of other meshes, to report")
    arguments, records = parse(parser)
    if arguments.report:
        others = [list(last_records(path).values()) for path in arguments.also]
        text = report(list(records.values()), arguments.note, others)
        arguments.report.with_suffix(".md").write_text("\n".join(text) + "\n")
        return
    listed = set(arguments.listed.read_text().split()) if arguments.listed else None

    def names(family: str) -> Sequence[str]:
        found = one_of_each_kind() if family == "timm" and arguments.kinds else architectures(family)
        return [name for name in found if listed is None or name in listed]

    options = {"meshes": arguments.mesh or [(8,)], "gap": arguments.gap}
    print(sweep(arguments, records, "plan_worker.py", PLANNER, options, told, names))
    print(*table(rows(records.values()), "<" + ">" * (len(HEAD) - 1), head=HEAD, indent=0), sep="\n")
    print(
        *table(without_rule(records.values(), "ops_without"), "<><", head=["op without a rule", "in", ""], indent=0),
        sep="\n",
    )


if __name__ == "__main__":
    main()
