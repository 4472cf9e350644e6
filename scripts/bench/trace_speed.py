"""CPU seconds of autopar's trace, of torch.export (non-strict) and of torch._dynamo, for full-size models on meta.

python scripts/bench/trace_speed.py                 # all models
python scripts/bench/trace_speed.py gpt2 t5         # models whose name contains one of the words
python scripts/bench/trace_speed.py --repeats 5 --markdown out/trace_speed.md --note "2 shared CPU cores"

Each combination of model and tracer has a process of its own, which repeats the measurement `--repeats` times on a new
model (less often once it has taken 30 s); the median counts. `first` is the first trace, which includes imports.
dynamo's seconds include one run of the captured graph on meta.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from markdown_tables import markdown
from torch import nn

from autopar.report.tables import table

# Differences from the default config of each architecture, which is that of a full-size model.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"architectures": "GPT2LMHeadModel"},
    "llama-7b": {"architectures": "LlamaForCausalLM"},
    "bert-large": {
        "architectures": "BertForMaskedLM",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "vit-l": {
        "architectures": "ViTForImageClassification",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "t5-large": {
        "architectures": "T5ForConditionalGeneration",
        "d_model": 1024,
        "d_ff": 4096,
        "num_layers": 24,
        "num_heads": 16,
        "decoder_start_token_id": 0,  # as in published models; the default is None
    },
    "mixtral-8x7b": {"architectures": "MixtralForCausalLM"},
    "deepseek-v3": {"architectures": "DeepseekV3ForCausalLM"},
}
DEPTHS = (2, 8, 32, 128)
COMPARED = tuple(name for name in MODELS if name != "deepseek-v3")
BATCH, LENGTH = 2, 512
_ENOUGH_SECONDS = 30  # after so much CPU time a measurement is not repeated


def make(name: str, layers: int | None = None) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model in training mode on the meta device, and its inputs, including labels."""
    import transformers

    transformers.logging.set_verbosity_error()
    values = dict(MODELS[name])
    architecture = getattr(transformers, values.pop("architectures"))
    if layers is not None:
        values["num_hidden_layers"] = layers
    config = architecture.config_class(**values, use_cache=False)
    with torch.device("meta"):
        model: Any = architecture(config).train()
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"  # the default, without the warning that stops dynamo
        ids = torch.empty(BATCH, LENGTH, dtype=torch.int64)
        if name.startswith("vit"):
            return model, {"pixel_values": torch.empty(BATCH, 3, 224, 224), "labels": ids[:, 0].contiguous()}
        return model, {"input_ids": ids, "labels": torch.empty_like(ids)}


def trace(model: nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    from autopar.tracing import trace

    return len(trace(model, inputs).graph.nodes)


def annotated(model: nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    from autopar.cost import annotate
    from autopar.tracing import trace

    traced = trace(model, inputs)
    annotate(traced.graph, "cuda", traced.root)
    return len(traced.graph.nodes)


def export(model: nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    return len(torch.export.export(model, (), inputs, strict=False).graph.nodes)


def dynamo(model: nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    """Capture with a backend that only counts nodes and returns the graph."""
    counts = []

    def backend(module: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        counts.append(len(module.graph.nodes))
        return module.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(**inputs)
    return sum(counts)


WAYS: dict[str, Callable[[nn.Module, dict[str, torch.Tensor]], int]] = {
    "trace": trace,
    "annotated": annotated,
    "export": export,
    "dynamo": dynamo,
}


def measure(way: str, name: str, repeats: int, layers: int | None) -> dict[str, Any]:
    """Measure one tracer on one model in this process: CPU seconds of each repetition."""
    torch.set_num_threads(1)
    seconds, nodes = [], 0
    for _ in range(repeats):
        model, inputs = make(name, layers)
        gc.collect()
        start = time.process_time()
        nodes = WAYS[way](model, inputs)
        seconds.append(time.process_time() - start)
        if sum(seconds) > _ENOUGH_SECONDS:
            break
        del model, inputs
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "nodes": nodes, "peak_bytes": peak}


def in_process(way: str, name: str, repeats: int, layers: int | None = None) -> dict[str, Any]:
    """`measure` in a new process; if that fails, the reason under "why"."""
    order = json.dumps([way, name, repeats, layers])
    done = subprocess.run([sys.executable, __file__, "--measure", order], capture_output=True, text=True)
    if done.returncode:
        return {"why": (done.stderr.strip().splitlines() or ["?"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compared(name: str, repeats: int) -> list[str]:
    """One row of the table: seconds of each tracer, and their ratios."""
    ways = WAYS if name in COMPARED else ("trace", "annotated")
    results = {way: in_process(way, name, repeats) for way in ways}
    medians = {way: statistics.median(r["seconds"]) for way, r in results.items() if "seconds" in r}
    for way, result in results.items():
        if "why" in result:
            print(f"{name}, {way}: {result['why']}", file=sys.stderr)

    def seconds(way: str) -> str:
        return f"{medians[way]:.2f}" if way in medians else "fails" if way in ways else ""

    def ratio(way: str, to: str) -> str:
        return f"{medians[way] / medians[to]:.1f}" if way in medians and to in medians else ""

    ours = results["annotated"]
    return [
        name,
        str(ours.get("nodes", "")),
        f"{results['trace']['seconds'][0]:.2f}" if "trace" in medians else "fails",
        *map(seconds, ("trace", "annotated", "export", "dynamo")),
        ratio("export", "trace"),
        ratio("dynamo", "trace"),
        ratio("export", "annotated"),
        f"{ours['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in ours else "",
    ]


HEAD = ["model", "nodes", "first", "trace", "annotated", "export", "dynamo"]
HEAD += ["export / trace", "dynamo / trace", "export / annotated", "peak GiB"]
SHORT = ["model", "nodes", "first", "trace", "annot.", "export", "dynamo", "exp/tr", "dyn/tr", "exp/an", "GiB"]
DEPTH_HEAD = ["layers", "nodes", "trace s", "annotated s", "trace µs a node", "annotated µs a node"]


def by_depth(repeats: int) -> list[list[str]]:
    """Rows for Llama at several depths, to show that the time per node does not grow with the number of nodes."""
    rows = []
    for layers in DEPTHS:
        results = [in_process(way, "llama-7b", repeats, layers) for way in ("trace", "annotated")]
        seconds = [statistics.median(result["seconds"]) for result in results]
        nodes = results[0]["nodes"]
        per_node = [f"{1e6 * s / nodes:.0f}" for s in seconds]
        rows.append([str(layers), str(nodes), *(f"{s:.3f}" for s in seconds), *per_node])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help=f"parts of names: {', '.join(MODELS)}; depth: time by layers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there too")
    parser.add_argument("--note", action="append", default=[], help="a sentence for the head of the file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(*json.loads(given.measure))))
        return
    names = [name for name in MODELS if not given.words or any(word in name for word in given.words)]
    rows: list[list[str]] = []
    depths: list[list[str]] = []
    for name in names:
        rows.append(compared(name, given.repeats))
        print(*rows[-1], file=sys.stderr, flush=True)
        _write(given.markdown, given.note, rows, depths)
    if not given.words or "depth" in given.words:
        depths = by_depth(given.repeats)
        _write(given.markdown, given.note, rows, depths)
    print(*table(rows, "<" + ">" * (len(SHORT) - 1), head=SHORT, indent=0), sep="\n")
    print("", *table(depths, ">" * len(DEPTH_HEAD), head=DEPTH_HEAD, indent=0), sep="\n")


def _write(path: Path | None, notes: list[str], rows: list[list[str]], depths: list[list[str]]) -> None:
    if path is None:
        return
    text = ["# Trace against torch.export and torch._dynamo", "", *notes, ""]
    text += [f"CPU seconds, medians; batch {BATCH}, {LENGTH} tokens or pictures of 224 x 224, in training mode.", ""]
    text += [*markdown(HEAD, rows), ""]
    text += ["## Llama-7B by number of layers", "", *markdown(DEPTH_HEAD, depths), ""] if depths else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text).rstrip() + "\n")


if __name__ == "__main__":
    main()
