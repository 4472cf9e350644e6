"""Tables of the ablation, as Markdown and as LaTeX (booktabs)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import features
import measured
from features import RUNS_ON
from grid import BASE
from records import Record

from autopar.report.tables import show_seconds
from autopar.sizes import show_bytes

_GIB = 1 << 30
_NOTHING = 1e-3
"""Relative differences of step time below this are shown as 0: plans are solved to a gap of 0.1 %."""


@dataclass(frozen=True)
class Effect:
    """One case with a feature on and off."""

    feature: str
    on: Record
    off: Record

    @property
    def case(self) -> str:
        return case_name(self.on)

    @property
    def slower(self) -> float | None:
        """Additional step time with the feature off, relative to that with it on; None if either does not fit."""
        if self.on["fits"] and self.off["fits"]:
            return float(self.off["step_seconds"] / self.on["step_seconds"] - 1)
        return None

    @property
    def more_bytes(self) -> int | None:
        """Additional peak bytes with the feature off; if that does not fit, its smallest budget takes the peak's place.
        None if the plan with the feature does not fit."""
        off = self.off["peak_bytes"] if self.off["fits"] else self.off["smallest_budget_bytes"]
        return None if off is None or not self.on["fits"] else int(off - self.on["peak_bytes"])

    def shown_time(self) -> str:
        if self.slower is not None:
            return show_percent(self.slower)
        return "does not fit" if self.on["fits"] else "neither fits" if not self.off["fits"] else "fits only off"

    def shown_memory(self) -> str:
        if self.more_bytes is None:
            return "–"
        size = abs(self.more_bytes) / _GIB
        return "0" if size < 0.05 else f"{'+' if self.more_bytes > 0 else '−'}{size:.1f}"


def show_percent(part: float) -> str:
    """
    >>> show_percent(0.0312), show_percent(-0.5), show_percent(9e-4), show_percent(12.3)
    ('+3.1 %', '−50 %', '0', '+1,230 %')
    """
    if abs(part) < _NOTHING:
        return "0"
    size = 100 * abs(part)
    return f"{'+' if part > 0 else '−'}{size:,.{1 if size < 10 else 0}f} %"


def case_name(record: Record) -> str:
    mesh = "x".join(map(str, record["mesh"]))
    return f"{record['model']}, {record['preset']} {mesh}, {record['budget']}"


def planned_effects(records: Sequence[Record]) -> list[Effect]:
    """The effects of all planned runs whose case also has a run with every feature on."""
    base = {case_name(r): r for r in records if r["kind"] == "planned" and r["feature"] == BASE}
    found = []
    for record in records:
        name = case_name(record)
        if record["kind"] == "planned" and record["feature"] != BASE and name in base:
            here, there = base[name], record
            swapped = record["feature"] in RUNS_ON
            found.append(Effect(record["feature"], *((there, here) if swapped else (here, there))))
    return found


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> Iterator[str]:
        yield from (f"## {self.title}", "", self.note, "")
        yield "| " + " | ".join(self.head) + " |"
        yield "| --- |" + " ---: |" * (len(self.head) - 1)
        yield from ("| " + " | ".join(row) + " |" for row in self.rows)
        yield ""

    def latex(self) -> Iterator[str]:
        yield from (r"\begin{table}", rf"\caption{{{_latex(self.title)}. {_latex(self.note)}}}")
        yield rf"\begin{{tabular}}{{l{'r' * (len(self.head) - 1)}}}"
        yield from (r"\toprule", " & ".join(map(_latex, self.head)) + r" \\", r"\midrule")
        yield from (" & ".join(map(_latex, row)) + r" \\" for row in self.rows)
        yield from (r"\bottomrule", r"\end{tabular}", r"\end{table}", "")


def _latex(text: str) -> str:
    """
    >>> _latex("+3 %, 1_000")
    '+3 \\\\%, 1\\\\_000'
    """
    for sign in "%_&#":
        text = text.replace(sign, "\\" + sign)
    return text.replace("−", "$-$").replace("–", "--")


def tables(records: Sequence[Record]) -> Iterator[Table]:
    effects = planned_effects(records)
    order = [name for name in features.FEATURES if any(e.feature == name for e in effects)]
    if effects:
        yield _worth(effects, order)
        yield _base(records)
        folded = [e for e in effects if e.feature == "fold"]
        others = [e for e in effects if e.feature != "fold"]
        for name, note, show in (
            ("Seconds, case by case", "How much slower a step is without the feature.", Effect.shown_time),
            (
                "Memory, case by case",
                "GiB at the peak more without the feature; where its plan does not fit the budget, by how much the "
                "smallest budget that has one is above the peak with it.",
                Effect.shown_memory,
            ),
        ):
            if others:
                yield _by_case(name, note, others, [f for f in order if f != "fold"], show)
        if folded:
            yield _folding(folded)
    found = [r for r in records if r["kind"] == "measured"]
    if found:
        yield _measured(found)


def _worth(effects: Sequence[Effect], order: Sequence[str]) -> Table:
    rows = []
    for name in order:
        some = [e for e in effects if e.feature == name]
        slower = [e.slower for e in some if e.slower is not None]
        spread = [min(slower), statistics.median(slower), max(slower)] if slower else []
        rows.append(
            [
                name,
                str(len(some)),
                *(map(show_percent, spread) if spread else ("–",) * 3),
                str(sum(abs(s) < _NOTHING for s in slower)),
                str(sum(e.on["fits"] and not e.off["fits"] for e in some)),
            ]
        )
    head = ["off", "cases", "least", "median", "most", "worth nothing", "does not fit"]
    note = (
        "How much slower a step is predicted to be without the feature, over the cases in which both plans fit; in how "
        "many of these that is less than 0.1 %, the gap to which plans are solved; and in how many cases there is no "
        "plan within the budget without it."
    )
    return Table("What each feature is worth, as predicted", note, head, rows)


def _base(records: Sequence[Record]) -> Table:
    rows = []
    for r in records:
        if r["kind"] == "planned" and r["feature"] == BASE:
            figures = (
                [
                    show_seconds(r["step_seconds"]),
                    show_bytes(r["peak_bytes"]),
                    show_seconds(r["recompute_seconds"]),
                    show_seconds(r["comm_seconds"]),
                    show_seconds(r["hidden_seconds"]),
                    f"{100 * r['gap']:.2f} %",
                ]
                if r["fits"]
                else ["does not fit", *[""] * 5]
            )
            rows.append([case_name(r), str(r["devices"]), *figures])
    head = ["case", "devices", "step", "peak", "recompute", "communication", "hidden", "gap"]
    note = (
        "Predicted, of one device and one optimizer step. Hidden is what passes behind compute, of communication "
        "and of the gathers that recompute repeats."
    )
    return Table("The cases, with nothing off", note, head, rows)


def _by_case(title: str, note: str, effects: Sequence[Effect], order: Sequence[str], show: object) -> Table:
    assert callable(show)
    cell = {(e.case, e.feature): show(e) for e in effects}
    cases = list(dict.fromkeys(e.case for e in effects))
    rows = [[case, *(cell.get((case, name), "") for name in order)] for case in cases]
    return Table(title, note, ["case", *order], rows)


def _folding(effects: Sequence[Effect]) -> Table:
    rows = []
    for e in effects:
        sizes = [f"{r['variables']:,}" if r["fits"] else "" for r in (e.on, e.off)]
        seconds = [f"{r['cpu_seconds']:.1f}" for r in (e.on, e.off)]
        rows.append([e.case, e.shown_time(), e.shown_memory(), *sizes, *seconds])
    head = ["case", "step", "GiB", "variables", "not folded", "planning CPU s", "not folded"]
    note = "What a step loses where equal blocks decide alike (negative: it is faster without), and what that saves."
    return Table("Folding", note, head, rows)


def _measured(records: Sequence[Record]) -> Table:
    rows = []
    for name in measured.FEATURES:
        for r in (r for r in records if r["feature"] == name):
            rows.append(
                [
                    name,
                    f"{r['model']}, {r['mesh'][0]} ranks",
                    str(r["pairs"]),
                    f"{r['on_seconds']:.3f}",
                    f"{r['off_seconds']:.3f}",
                    f"{r['ratio']:.3f}",
                    f"{r['ratio_low']:.3f} to {r['ratio_high']:.3f}",
                    show_bytes(r["on_peak_bytes"]),
                    show_bytes(r["off_peak_bytes"]),
                    f"{r['off_peak_bytes'] / r['on_peak_bytes']:.3f}",
                    f"{r['off_predicted_bytes'] / r['on_predicted_bytes']:.3f}",
                ]
            )
    head = ["off", "case", "pairs", "on s", "off s", "ratio", "95 %", "on peak", "off peak", "ratio", "predicted"]
    note = (
        "Steps in interleaved pairs on gloo and CPU; ratios are off by on, medians of pairs, above 1 where the feature "
        "is worth something. Peaks: bytes of live tensors on the rank that has most; the last column is the ratio that "
        "the plans predict."
    )
    return Table("Measured", note, head, rows)


def write_report(folder: Path, records: Sequence[Record], wanted: int) -> None:
    """Write `report.md` and `tables.tex`, which also say how many runs are missing."""
    made = list(tables(records))
    lines = [] if len(records) == wanted else [f"Not complete: {len(records)} of {wanted} runs.", ""]
    lines += [line for table in made for line in table.markdown()]
    (folder / "report.md").write_text("\n".join(lines).rstrip() + "\n")
    (folder / "tables.tex").write_text("\n".join(line for table in made for line in table.latex()))
