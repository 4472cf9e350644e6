"""Published times of steps and layers compared with autopar's predictions for the same plans, from presets alone.

    python scripts/bench/published.py            # the tables, as docs/results/published.md has them
    python scripts/bench/published.py kor22 fms  # rows whose id contains one of the words

`published_runs.csv` holds the measurements with their sources: all runs of our table without pipeline parallelism and
with a named device, one layer of Llama 2 on an unnamed device, and collectives on one and two nodes. RUNS describes the
plan of each run; nothing is fitted to the measurements.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from given_plans import Priced, before_gather_trees, price, with_flat_buffers
from published_models import GPT, llama
from torch import nn

from autopar.cluster import Cluster
from autopar.cost.collectives import collective_seconds
from autopar.hardware.devices import Node
from autopar.report.tables import table

Row = dict[str, str]


@dataclass(frozen=True)
class Run:
    """The plan of a published run. `replays`: which modules of layer {} are recomputed, and in how many layers.

    `used_as`: in which layouts parameters are read (see `given_plans`). `note`: how the source differs from this plan,
    or what it does not say.
    """

    model: Callable[[], nn.Module]
    layers: int
    preset: str
    mesh: tuple[int, ...]
    constraints: tuple[str, ...]
    batch: int  # sequences of one micro-batch, all devices together
    micro_batches: int = 1
    precision: str = "fp16"
    replays: tuple[str, ...] = ()
    replayed_layers: float = 1.0
    network: str | None = None
    sequence: int = 2048
    compiled: bool = False
    used_as: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


def gpt(layers: int, width: int, heads: int) -> Callable[[], nn.Module]:
    return lambda: GPT(layers, width, heads)


def lama(size: str) -> Callable[[], nn.Module]:
    return lambda: llama(size)


def _pins(layout: str) -> tuple[str, ...]:
    """Pins the layout of activations between the tensor-parallel parts of Megatron's layers."""
    return tuple(f"activation:blocks.*.{name} = {layout}" for name in ("ln1", "ln2", "drop1", "drop2"))


def _megatron(
    layers: int, width: int, heads: int, tensor: int, replicas: int, per_group: int, micro_batches: int = 1
) -> Run:
    """A run in table 1 of arXiv:2104.04473: data parallelism over tensor parallelism, every layer recomputed."""
    mesh = (replicas, tensor) if tensor > 1 else (replicas,)
    pins = ("tp", *_pins("S0,R")) if tensor > 1 else ("ddp",)
    model, replays = gpt(layers, width, heads), ("blocks.{}",)
    return Run(model, layers, "a100", mesh, pins, replicas * per_group, micro_batches, replays=replays)


_HIDES_LESS = "DeepSpeed of 2021, for its order alone: its gathers hide less behind compute"


def _zero(layers: int, width: int, heads: int, devices: int, per_device: int) -> Run:
    model, replays = gpt(layers, width, heads), ("blocks.{}",)
    return Run(model, layers, "a100", (devices,), ("fsdp",), devices * per_device, replays=replays, note=_HIDES_LESS)


def _fms(size: str, layers: int, replayed: float, mesh: tuple[int, ...] = (128,), preset: str = "fsdp") -> Run:
    """A run of FMS. `replayed`: the share of recomputed layers, 3 (HFU / MFU - 1) by the row's own MFU and HFU."""
    replays = ("model.layers.{}",) if replayed else ()
    return Run(lama(size), layers, "a100", mesh, (preset,), 256, 1, "bf16", replays, replayed, "4xroce100", 4096, True)


WHOLE = ("tp", *_pins("R"))
SEQUENCE = _pins("S1")
COLUMNS_AND_ROWS = {
    "blocks.*.qkv.weight": "S0",
    "blocks.*.out.weight": "S1",
    "blocks.*.up.weight": "S0",
    "blocks.*.down.weight": "S1",
    "tokens.weight": "S0",
}


def _korthikanti(constraints: tuple[str, ...], replays: tuple[str, ...] = ()) -> Run:
    used = COLUMNS_AND_ROWS
    return Run(gpt(48, 6144, 64), 48, "a100", (8,), constraints, 4, replays=replays, used_as=used)


_BEYOND = "4096 tokens a sequence, as the row says, would be {} of the device's peak; with 2048 it would be possible"
RUNS = {
    "nar21-t1-1.7B-step": _megatron(24, 2304, 24, 1, 32, 16),
    "nar21-t1-3.6B-step": _megatron(30, 3072, 32, 2, 32, 16),
    "nar21-t1-7.5B-step": _megatron(36, 4096, 32, 4, 32, 16),
    "nar21-t1-18.4B-step": _megatron(40, 6144, 48, 8, 32, 8, 4),
    "nar21-t2-z3-174.6-384": _zero(96, 12288, 96, 384, 4),
    "nar21-t2-z3-174.6-768": _zero(96, 12288, 96, 768, 2),
    "nar21-t2-z3-174.6-1536": _zero(96, 12288, 96, 1536, 1),
    "nar21-t2-z3-529.6-640": _zero(105, 20480, 128, 640, 4),
    "nar21-t2-z3-529.6-1120": _zero(105, 20480, 128, 1120, 2),
    "nar21-t2-z3-529.6-2240": _zero(105, 20480, 128, 2240, 1),
    "kor22-t5-22B-full": _korthikanti(WHOLE, ("blocks.{}",)),
    "kor22-t5-22B-sel": _korthikanti(SEQUENCE, ("blocks.{}.core",)),
    "fms-7B-a100": _fms("7B", 32, 0.0, (16, 8), "hsdp"),
    "fms-13B-a100": _fms("13B", 40, 3 * (0.69 / 0.61 - 1)),
    "fms-34B-a100": _fms("34B", 48, 1.0),
    "fms-70B-a100": _fms("70B", 80, 1.0),
    "a800-7b-tp4dp2": Run(
        lama("7B"), 32, "a800", (2, 4), ("tp",), 4, 16, "bf16", sequence=4096, note=_BEYOND.format("81 %")
    ),
    "a800-7b-dp8": Run(
        lama("7B"), 32, "a800", (8,), ("ddp",), 16, 16, "bf16", sequence=4096, note=_BEYOND.format("113 %")
    ),
}
LAYERS = {
    "none,TP8": _korthikanti(WHOLE),
    "none,TP8+SP": _korthikanti(SEQUENCE),
    "full,TP8": _korthikanti(WHOLE, ("blocks.{}",)),
    "selective,TP8": _korthikanti(WHOLE, ("blocks.{}.core",)),
    "selective,TP8+SP": _korthikanti(SEQUENCE, ("blocks.{}.core",)),
}


def priced(run: Run, model: nn.Module | None = None, layers: int | None = None) -> Priced:
    with torch.device("meta"):
        model = model or run.model()
    layers = layers or run.layers
    paths = [path.format(i) for i in range(round(run.replayed_layers * layers)) for path in run.replays]
    preset = Cluster.preset(run.preset, run.mesh, between_nodes=run.network)
    cluster = before_gather_trees(with_flat_buffers(preset))  # all ran before 2024, or on few nodes
    return price(
        model,
        run.batch,
        run.sequence,
        cluster,
        run.constraints,
        precision=run.precision,
        micro_batches=run.micro_batches,
        compiled=run.compiled,
        recomputed=paths,
        used_as=run.used_as,
    )


def published_seconds(row: Row, run: Run) -> float:
    """The step time in seconds that follows from a row's figure."""
    value = float(row["value"])
    if row["unit"] == "s":
        return value
    if row["unit"] == "tok/s":
        return run.batch * run.sequence * run.micro_batches / int(row["gpus"]) / value
    layers, width = (96, 12288) if "174.6" in row["id"] else (105, 20480)  # equation 3 of 2104.04473, with recompute
    tokens = run.batch * run.sequence
    flops = 96 * tokens * layers * width**2 * (1 + run.sequence / (6 * width) + 51200 / (16 * layers * width))
    return flops / (int(row["gpus"]) * value * 1e12)


def steps(rows: list[Row]) -> list[tuple[Row, float, float]]:
    """(row, published seconds, predicted seconds) of each step."""
    results = []
    for row in rows:
        run = RUNS.get(row["id"])
        if run is not None:
            print(row["id"], file=sys.stderr, flush=True)
            results.append((row, published_seconds(row, run), priced(run).step.step_seconds))
    return results


def layer(run: Run, form: str) -> float:
    """Seconds of one layer: the difference between three layers and two."""
    parts = []
    for layers in (2, 3):
        with torch.device("meta"):
            model = GPT(layers, 6144, 64)
        prices = priced(run, model, layers)
        times = {"layer fwd": prices.forward_seconds, "layer bwd": prices.backward_seconds}
        parts.append(times.get(form, sum(times.values())))
    return parts[1] - parts[0]


def llama_layer(batch: int) -> float:
    """Forward seconds per sample of one layer of Llama 2 7B on one device."""
    parts = []
    for layers in (2, 3):
        with torch.device("meta"):
            model = llama("7B", layers)
        device = Cluster.preset("a100", (1,))
        parts.append(price(model, batch, 2048, device, (), compiled=False).forward_seconds)
    return (parts[1] - parts[0]) / batch


def layer_times(rows: list[Row]) -> list[tuple[Row, float, float]]:
    results = []
    for row in rows:
        if row["id"].startswith("kor22-t4"):
            results.append((row, float(row["value"]) * 1e-3, layer(LAYERS[row["recompute"]], row["metric"])))
        elif row["id"].startswith("galv-7b-fwd"):
            results.append((row, float(row["value"]) * 1e-3, llama_layer(int(row["mbs_per_dp"]))))
    return results


def collectives(rows: list[Row]) -> list[tuple[Row, float, float]]:
    """Milliseconds or GB/s in one node, and GB/s of groups over two nodes, given the rate of a group of all devices."""
    results = []
    by_id = {row["id"]: float(row["value"]) for row in rows}
    for row in rows:
        if not row["id"].startswith(("galv-ar", "galv-a2a")):
            continue
        size, value = int(row["gpus"]), float(row["value"])
        if row["unit"] == "ms":
            axis = Cluster.preset("a100", (size,)).axes[0]
            kind = "all_reduce" if "-ar-" in row["id"] else "all_to_all"
            count = int(row["id"].rpartition("-")[2][:-2]) * 2**20
            results.append((row, value, collective_seconds(kind, count, axis) * 1e3))
        elif "2n" in row["id"]:
            node = Node(8, by_id["galv-ar-1n-8"] * 1e9, 0.0, by_id["galv-ar-2n-16"] * 1e9, 0.0)
            results.append((row, value, node.axes((size, 16 // size), "ab")[0].bytes_per_s / 1e9))
        else:
            results.append((row, value, Cluster.preset("a100", (size,)).axes[0].bytes_per_s / 1e9))
    return results


def show(title: str, results: list[tuple[Row, float, float]], scale: float, unit: str, notes: dict[str, str]) -> None:
    """Print one table with its median error, and notes on rows with an error above 25 %."""
    if not results:
        return
    errors = [predicted / measured - 1 for _, measured, predicted in results]
    lines = [
        [row["id"], row["hardware"], f"{scale * measured:.4g}", f"{scale * predicted:.4g}", f"{100 * error:+.1f} %"]
        for (row, measured, predicted), error in zip(results, errors, strict=True)
    ]
    size = [abs(error) for error in errors]
    print(f"## {title}\n\nMedian error {100 * statistics.median(size):.1f} %, worst {100 * max(size):.0f} %.\n\n```")
    head = ["row", "hardware", f"published {unit}", f"predicted {unit}", "error"]
    print(*table(lines, "<<>>>", head=head, indent=0), sep="\n")
    print("```\n")
    for (row, _, _), error in zip(results, errors, strict=True):
        if abs(error) > 0.25:
            print(f"- {row['id']}, {100 * error:+.0f} %: {notes.get(row['id'], 'no reason known')}.")
    print()


_SMALL = "smaller messages reach less of the links than latency and rate say: NCCL changes protocol and channels there"
_OTHER_SIZE = "the same source's times by size, above, are 180 to 230 GB/s: this figure is of messages it does not name"
_SHARED = "four and eight groups at once get 65 GB/s out of a node whose cards give one group 45"


def _of(results: list[tuple[Row, float, float]], note: str) -> dict[str, str]:
    return {row["id"]: note for row, _, _ in results}


def main(words: list[str]) -> None:
    with open(Path(__file__).with_name("published_runs.csv")) as file:
        rows = [row for row in csv.DictReader(file) if not words or any(word in row["id"] for word in words)]
    notes = {name: run.note for name, run in RUNS.items() if run.note}
    show("Step time", steps(rows), 1.0, "s", notes)
    layers = layer_times(rows)
    named = [result for result in layers if result[0]["id"].startswith("kor22")]
    show("One layer, device named", named, 1e3, "ms", notes)
    show("One layer forward for a sample, device not named", [f for f in layers if f not in named], 1e3, "ms", notes)
    collective_results = collectives(rows)
    inside = [result for result in collective_results if result[0]["unit"] == "ms"]
    show("Collectives in one node", inside, 1.0, "ms", _of(inside, _SMALL))
    across = [result for result in collective_results if result not in inside]
    within = [result for result in across if "1n" in result[0]["id"]]
    wide = [result for result in across if "2n" in result[0]["id"]]
    show("Bus bandwidth of all-reduces", across, 1.0, "GB/s", {**_of(within, _OTHER_SIZE), **_of(wide, _SHARED)})


if __name__ == "__main__":
    main(sys.argv[1:])
