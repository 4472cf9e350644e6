"""The zoo's records as tables: a summary by family, failures with causes, and one line per architecture."""

from __future__ import annotations

import collections
import csv
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown_tables import markdown
from zoo_models import FAMILIES, title
from zoo_source import TRACER, told

from autopar.report.tables import table

Records = Mapping[tuple[str, str], Mapping[str, Any]]
_BUILT = ("whole", "leaves", "failed", "no inputs", "does not run")


def last_records(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The last record of each architecture; {} if there is no file yet."""
    if not path.exists():
        return {}
    records = map(json.loads, path.read_text().splitlines())
    return {(record["family"], record["name"]): record for record in records}


def _rows(records: Records) -> list[list[str]]:
    rows = []
    for family in FAMILIES:
        mine = [record for (of, _), record in records.items() if of == family]
        if not mine:
            continue
        count = collections.Counter(record["status"] for record in mine)
        built = sum(count[status] for status in _BUILT)
        runs = built - count["does not run"]
        traced = [record for record in mine if record["status"] in ("whole", "leaves")]
        rows.append(
            [
                title(family),
                str(len(mine)),
                str(built),
                *(str(count[status]) for status in _BUILT),
                f"{100 * count['whole'] / runs:.1f} %" if runs else "",
                str(count["whole"] + sum(bool(record.get("unrolled")) for record in mine)),
                f"{statistics.median(r['seconds'] for r in traced):.2f}" if traced else "",
                f"{max(r['seconds'] for r in traced):.1f}" if traced else "",
                f"{max(r['nodes'] for r in traced):,}" if traced else "",
                f"{max(r['peak_bytes'] for r in traced) / 2**30:.2f}" if traced else "",
            ]
        )
    return rows


_HEAD = ["family", "run", "built", "whole", "leaves", "failed", "no inputs", "does not run", "whole of those that run"]
_HEAD += ["whole, or whole at fewer tokens", "median CPU s", "most CPU s", "most nodes", "peak GiB"]


def summary(records: Records) -> list[str]:
    """A summary by family as lines of text."""
    short = ["family", "run", "built", "whole", "leaves", "failed", "no in", "no run"]
    short += ["whole", "+short", "med s", "max s", "nodes", "GiB"]
    return table(_rows(records), "<" + ">" * (len(short) - 1), head=short, indent=0)


def cause(record: Mapping[str, Any]) -> str:
    """Why a model was not traced, without names and numbers, so that equal causes have equal texts."""
    text = re.sub(r"\[at .*?\]", "", str(record.get("why", "")))
    text = re.sub(r"'[^']*'", "'…'", text)
    return re.sub(r"\d+(\.\d+)?", "N", text)[:110].strip()


def write_report(records: Records, path: Path, notes: Sequence[str]) -> None:
    """Write `path`.md (summary, and models not traced as a whole) and `path`.csv (one line per architecture)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["# The zoo, traced", "", *notes, told(records.values(), TRACER), "", *markdown(_HEAD, _rows(records)), ""]
    lines += [
        "run: architectures in the registry that were run. built: their default config gives a model. whole: every op "
        "is in the graph. leaves: some modules, or functions, `f()`, are one node, in the worst case the model's "
        "`forward()`. no inputs: the benchmark makes no example for it. does "
        "not run: the model itself, called with these inputs and without a trace, raises the same error, on the meta "
        "device or on the CPU (a default config that cannot run, or an example that does not fit). whole at fewer "
        "tokens: a loop over time passes the limit of nodes at the length of the others and its module is a leaf "
        "there; a shorter text is traced op by op. CPU seconds are of the trace alone; peak memory is that of the "
        "process, libraries included.",
        "",
        "To run it again: `python scripts/bench/trace_zoo.py --cpu-seconds 25` (hours; it goes on where it was "
        "stopped, and with `--again old` where records are of another tracer), then the same with `--report "
        "out/trace_zoo`. Records are kept in `out/trace_zoo.jsonl`, a line an architecture.",
        "",
    ]
    if changed := [record for record in records.values() if "changed" in record]:
        rows = [[r["name"], title(r["family"]), r["changed"], r["status"]] for r in changed]
        lines += ["## With something changed", "", *markdown(["architecture", "family", "changed", "then"], rows), ""]
    for status in ("leaves", *_BUILT[2:], "not built"):
        mine = [record for record in records.values() if record["status"] == status]
        if mine:
            lines += [f"## {status.capitalize()}", "", *_listed(mine), ""]
    path.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")
    _write_csv(records, path.with_suffix(".csv"))


def _listed(records: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for record in records:
        if record["status"] == "leaves":
            kinds = collections.Counter(kind for _, kind, _ in record["leaves"])
            what = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
            why = next((text for *_, text in record["leaves"] if text), "")
            if fewer := record.get("unrolled"):
                why = f"{why}; whole at {fewer['tokens']} tokens: {fewer['nodes']:,} nodes"
            rows.append([record["name"], title(record["family"]), what, _short(why)])
        else:
            eager = record.get("eager", "")
            rows.append([record["name"], title(record["family"]), _short(record.get("why", "")), _short(eager, 80)])
    last = ["leaves", "why"] if records[0]["status"] == "leaves" else ["why", "run on the meta device without a trace"]
    return markdown(["architecture", "family", *last], rows)


def _short(text: str, width: int = 160) -> str:
    """The text on one line, shortened, without folders of the machine."""
    text = re.sub(r"/\S*?site-packages/", "", text)
    text = re.sub(r"/\S+/(\S+\.py)", r"\1", text)
    return text if len(text) <= width else text[: width - 1] + "…"


def _write_csv(records: Records, path: Path) -> None:
    with path.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(
            ["family", "architecture", "status", "parameters", "nodes", "cpu_seconds", "peak_mib", "leaves", "why"]
        )
        for family in FAMILIES:
            for record in (r for (of, _), r in records.items() if of == family):
                writer.writerow(
                    [
                        family,
                        record["name"],
                        record["status"],
                        record.get("parameters", ""),
                        record.get("nodes", ""),
                        record.get("seconds", ""),
                        record["peak_bytes"] // 2**20 if "peak_bytes" in record else "",
                        " ".join(sorted({kind for _, kind, _ in record.get("leaves", ())})),
                        _short(record.get("why", "")),
                    ]
                )
