"""Step time of autopar against what an expert writes by hand, in interleaved pairs on real ranks; and peak memory.

    torchrun --standalone --nproc-per-node 2 scripts/bench/step_time.py                # small models, seconds each
    torchrun --standalone --nproc-per-node 2 scripts/bench/step_time.py --model gpt2 --only ddp --pairs 20

A pair is one step of each (forward, backward, the same fused AdamW, zero_grad) in one process, in alternating order,
between barriers. The table gives the median of autopar's time over the other's in a pair with a 95 % interval by
bootstrap, and the largest rank's peak of bytes in live tensors.

=====  =========================================  ===========================================================
name   autopar                                    by hand
=====  =========================================  ===========================================================
ddp    constraints="ddp", each rank its part      DistributedDataParallel
fsdp   constraints="fsdp", each rank its part     fully_shard for each block
tp     constraints="tp", the batch on every rank  parallelize_module (Llama alone)
sp     the same                                   parallelize_module with sequence parallelism (Llama alone)
=====  =========================================  ===========================================================

With `--own` autopar is not pinned, and stands beside the same.

Batches are text: the reference pages of Python's own documentation (`pydoc_data.topics`), one token a byte.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autopar import autoparallelize
from autopar.report.tables import table
from autopar.sizes import show_bytes

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
from by_hand import BY_HAND
from peak_memory import LiveStorages

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model, and the shape of one rank's part of the batch."""

    build: Callable[[], nn.Module]
    rows: int
    sequence: int
    vocabulary: int
    blocks: str  # path of the list of blocks


def gpt2(layers: int, width: int, heads: int, vocabulary: int) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def llama(layers: int, width: int, heads: int, vocabulary: int) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


CASES = {
    "gpt2-small": Case(lambda: gpt2(6, 384, 6, 4096), 4, 128, 4096, "transformer.h"),
    "gpt2": Case(lambda: gpt2(12, 768, 12, 50257), 1, 256, 50257, "transformer.h"),
    "llama-small": Case(lambda: llama(6, 384, 6, 4096), 4, 128, 4096, "model.layers"),
    "llama-350m": Case(lambda: llama(24, 1024, 16, 32000), 1, 256, 32000, "model.layers"),
}


def build(case: Case) -> nn.Module:
    """The same weights wherever this is called."""
    torch.manual_seed(0)
    return case.build().train()


@functools.cache
def corpus() -> torch.Tensor:
    """Some 700 kB of English about Python, as bytes."""
    text = "\n\n".join(topics.topics.values()).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch(case: Case, step: int, rows: int, part: int = 0) -> Batch:
    """Rows of text from places drawn at random."""
    generator = torch.Generator().manual_seed(7919 * step + part)
    starts = torch.randint(0, len(corpus()) - case.sequence, (rows, 1), generator=generator)
    ids = corpus()[starts + torch.arange(case.sequence)]
    return {"input_ids": ids, "labels": ids}


# -- one comparison ---------------------------------------------------------------------------------------------------


class Trained:
    """A model with its optimizer and what it is fed."""

    def __init__(self, model: nn.Module, case: Case, whole: bool) -> None:
        self.model, self.case, self.whole = model, case, whole
        groups: dict[type, list[nn.Parameter]] = {}  # one fused call takes DTensors or plain tensors
        for parameter in model.parameters():
            groups.setdefault(type(parameter.data), []).append(parameter)
        self.optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)

    def inputs(self, step: int) -> Batch:
        ranks = dist.get_world_size()
        if self.whole:
            return batch(self.case, step, ranks * self.case.rows)
        return batch(self.case, step, self.case.rows, dist.get_rank())

    def step(self, inputs: Batch) -> float:
        loss = self.model(**inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def seconds(self, step: int) -> float:
        inputs = self.inputs(step)
        dist.barrier()
        start = time.perf_counter()
        self.step(inputs)
        dist.barrier()
        return time.perf_counter() - start

    def peak_bytes(self, step: int) -> int:
        inputs = self.inputs(step)
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        with LiveStorages([*self.model.parameters(), *self.model.buffers(), *states, *inputs.values()]) as live:
            self.step(inputs)
        largest = torch.tensor(live.peak_bytes)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)


def compare(name: str, kind: str, own: bool, pairs: int, warm_up: int) -> list[str]:
    """One row of the table; `own`: ours is not pinned to the kind."""
    case, ranks = CASES[name], dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ranks",))
    local = kind not in ("tp", "sp")
    example = batch(case, 0, ranks * case.rows)
    pins = () if own else "tp" if kind == "sp" else kind
    planned = autoparallelize(build(case), example, mesh, constraints=pins, inputs="local" if local else "global")
    ours, theirs = (
        Trained(planned, case, not local),
        Trained(BY_HAND[kind](build(case), case.blocks, mesh), case, not local),
    )
    losses = [(ours.step(ours.inputs(step)), theirs.step(theirs.inputs(step))) for step in range(warm_up)]
    check_losses(losses, mean=local)
    times = []
    for step in range(pairs):
        order = (ours, theirs) if step % 2 else (theirs, ours)
        seconds = {id(trained): trained.seconds(warm_up + step) for trained in order}
        times.append((seconds[id(ours)], seconds[id(theirs)]))
    peaks = ours.peak_bytes(0), theirs.peak_bytes(0)
    low, middle, high = median_with_interval([a / b for a, b in times])
    return [
        name,
        "own" if own else str(pins),
        BY_HAND[kind].__name__,
        f"{statistics.median(a for a, _ in times):.3f}",
        f"{statistics.median(b for _, b in times):.3f}",
        f"{middle:.3f}",
        f"{low:.3f} to {high:.3f}",
        show_bytes(peaks[0]),
        show_bytes(peaks[1]),
    ]


def check_losses(losses: Sequence[tuple[float, float]], *, mean: bool) -> None:
    """Both train the same thing: ours is the loss of the whole batch, theirs of a rank's part where `mean`."""
    for ours, theirs in losses:
        whole = torch.tensor(theirs)
        if mean:
            dist.all_reduce(whole)
            whole /= dist.get_world_size()
        if abs(ours - whole.item()) > 2e-3:
            raise AssertionError(f"losses differ, this is no comparison: {ours} and {whole.item()}")


def median_with_interval(ratios: Sequence[float], draws: int = 10_000) -> tuple[float, float, float]:
    """2.5 %, 50 % and 97.5 %: of the median of resampled pairs, the median itself in the middle."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], statistics.median(ratios), medians[int(0.975 * draws)]


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, as GPU allocators do: else page faults fall on whoever allocates last.

    They came to a tenth of a step, on one model or the other by the order in which the two were built.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        for option, value in ((_TRIM_THRESHOLD, 1 << 30), (_MMAP_MAX, 0)):
            library.mallopt(option, value)


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=CASES, help="default: gpt2-small, and llama-small for tp")
    parser.add_argument("--only", choices=BY_HAND, action="append", help="one of the comparisons (may be repeated)")
    parser.add_argument("--own", action="store_true", help="leave the choice of the plan to the planner")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    rows = []
    for kind in options.only or BY_HAND:
        name = options.model or ("llama-small" if kind in ("tp", "sp") else "gpt2-small")
        if kind in ("tp", "sp") and not name.startswith("llama"):
            raise SystemExit("parallelize_module shards nn.Linear, which GPT-2 has not: take a Llama for tp and sp")
        rows.append(compare(name, kind, options.own, options.pairs, options.warm_up))
        if dist.get_rank() == 0:
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        head = ["model", "plan", "by hand", "autopar s", "by hand s", "ratio", "95 %", "autopar peak", "by hand peak"]
        print(*table(rows, "<<<>>>>>>", head=head, indent=0), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
