"""One GPU: measured and predicted seconds and bytes of plans under decreasing budgets, and those of the plain model.

    torchrun --standalone --nproc-per-node 1 scripts/bench/one_gpu.py                # all models, a table each
    torchrun --standalone --nproc-per-node 1 scripts/bench/one_gpu.py llama --steps 20
    torchrun --standalone --nproc-per-node 1 scripts/bench/one_gpu.py bert --precision bf16 --compile --no-budgets
    torchrun --standalone --nproc-per-node 1 scripts/bench/one_gpu.py tiny --device cpu

All train with the same weights on the same batch in bf16: either pure (also weights and AdamW's moments), or with fp32
weights, for which the plain model uses autocast. Without autopar: the plain model, and the model with every block
recomputed (`gradient_checkpointing_enable`). With autopar: without a budget, with two budgets between the peaks of
these two, and with the smallest budget that has a plan. Plans are made from a profile of this device, which is measured
first; the predictions of the device's preset stand beside. Nothing is fitted to steps (forward, backward, fused AdamW,
zero_grad). The peak is the allocator's; "of requests" is the error relative to the bytes that tensors requested, since
the allocator's blocks are larger. With `--compile`, all forwards run under `torch.compile`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from step_cases import bert, gpt2, llama, vit
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from peak_memory import PeakMemory

from autopar import Cluster, Plan, autoparallelize
from autopar.errors import InfeasibleError
from autopar.planning.simulation import predicted_on
from autopar.planning.stages import Prepared, prepare, request_of, trace_for
from autopar.profiling.calibrate import measure_host
from autopar.report.tables import table
from autopar.sizes import show_bytes
from autopar.stopwatch import Stopwatch

Batch = dict[str, torch.Tensor]
WARM_UP = 3  # steps before timing; the last of them measures the peak


@dataclass(frozen=True)
class Model:
    """A model and its batch, both made on the default device."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]


def tokens(rows: int, length: int, vocabulary: int) -> Batch:
    ids = torch.randint(0, vocabulary, (rows, length))
    return {"input_ids": ids, "labels": ids}


def pixels(rows: int) -> Batch:
    return {
        "pixel_values": torch.rand(rows, 3, 224, 224),
        "labels": torch.randint(0, 1000, (rows,)),
    }


MODELS = {
    "gpt2": Model(lambda: gpt2(12, 768, 12, 50257), lambda: tokens(8, 1024, 50257)),
    "gpt2-xl": Model(lambda: gpt2(48, 1600, 25, 50257), lambda: tokens(8, 1024, 50257)),
    "llama": Model(lambda: llama(16, 2048, 32, 128256, 8192), lambda: tokens(4, 2048, 128256)),
    "bert": Model(lambda: bert(24, 1024, 16, 30522), lambda: tokens(64, 512, 30522)),
    "vit": Model(lambda: vit(24, 1024, 16, 224, 16, 1000), lambda: pixels(128)),
    "tiny": Model(lambda: llama(4, 128, 4, 512), lambda: tokens(4, 64, 512)),
}


@dataclass(frozen=True)
class Options:
    """Options that all ways to train share."""

    precision: str
    compiled: bool
    steps: int


@dataclass
class Ran:
    """Measured steps of one way to train; `seconds` is empty if it ran out of memory."""

    name: str
    plan: Plan | None = None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    requested_bytes: int = 0


class Bench:
    """All ways to train one model on this device."""

    def __init__(self, name: str, mesh: DeviceMesh, cluster: Cluster, preset: Cluster, options: Options) -> None:
        self.name, self.model, self.mesh, self.preset, self.options = name, MODELS[name], mesh, preset, options
        self.device = torch.device(mesh.device_type)
        with self.device:
            torch.manual_seed(1)
            self.batch = {name: self._as_weights(value) for name, value in self.model.batch().items()}
        self.prepared = self._prepared(cluster)
        self.ran: list[Ran] = []

    def _prepared(self, cluster: Cluster) -> Prepared:
        with torch.device("meta"):
            model = self._own()
        request = request_of(cluster, precision=self.options.precision, compiled=self.options.compiled)
        watch = Stopwatch()
        return prepare(model, trace_for(model, self.batch, None, request, watch), request, watch)

    def _built(self) -> nn.Module:
        with self.device:
            torch.manual_seed(0)
            return self._own()

    def _own(self) -> nn.Module:
        return self.model.build().to(self._weights).train()

    def _as_weights(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self._weights) if value.is_floating_point() else value

    @property
    def _weights(self) -> torch.dtype:
        return torch.bfloat16 if self.options.precision == "pure-bf16" else torch.float32

    def by_hand(self, name: str, *, recomputed: bool = False) -> Ran:
        model = self._built()
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return self._train(Ran(name), model, autocast=self.options.precision == "bf16")

    def planned(self, name: str, plan: Plan) -> Ran:
        return self._train(Ran(name, plan), autoparallelize(self._built(), self.batch, self.mesh, plan=plan))

    def _train(self, ran: Ran, model: nn.Module, *, autocast: bool = False) -> Ran:
        torch.compiler.reset()
        forward = torch.compile(model, disable=not self.options.compiled)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        memory, output = PeakMemory(self.device), None
        try:
            for step in range(WARM_UP + self.options.steps):
                self._wait()
                start = time.perf_counter()
                with memory.measure(model, optimizer, self.batch, when=step == WARM_UP - 1):
                    with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
                        output = forward(**self.batch)
                    output.loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                self._wait()
                if step >= WARM_UP:
                    ran.seconds.append(time.perf_counter() - start)
                ran.losses.append(float(output.loss.detach()))
        except torch.OutOfMemoryError:
            ran.seconds.clear()
        ran.peak_bytes, ran.requested_bytes = memory.peak_bytes, memory.requested_bytes
        del model, forward, optimizer, output
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.ran.append(ran)
        print(self.name, *self.cells(ran), sep="  ", file=sys.stderr, flush=True)
        return ran

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def without_budget(self) -> Ran:
        """Train the plain model (whose result is returned), and under the plan without a budget."""
        plain = self.by_hand("plain")
        self.planned("autopar", self.prepared.solve())
        return plain

    def all(self) -> None:
        plain = self.without_budget()
        recomputed = self.by_hand("every block recomputed", recomputed=True)
        low, high, least = recomputed.peak_bytes, plain.peak_bytes, self._least()
        for part in (2 / 3, 1 / 3) if low and high else ():  # neither ran out of memory
            budget = round(low + (high - low) * part)
            if least is None or budget >= least:  # compiled models may need less than any plan predicts
                self.planned(f"autopar, {show_bytes(budget)}", self.prepared.solve(memory_budget_bytes=budget))
        if least is not None:
            self.planned("autopar, the least", self.prepared.solve(memory_budget_bytes=least))

    def _least(self) -> int | None:
        """The smallest budget that has a plan; None if the planner does not find it in time."""
        try:
            self.prepared.solve(memory_budget_bytes=1)
        except InfeasibleError as error:
            return error.smallest_budget_bytes
        return None

    def cells(self, ran: Ran) -> list[str]:
        if not ran.seconds:
            return [ran.name, "out of memory"]
        middle = statistics.median(ran.seconds)
        plain = statistics.median(self.ran[0].seconds) if self.ran[0].seconds else middle
        found = [ran.name, f"{1e3 * middle:.1f}", f"{middle / plain:.3f}", show_bytes(ran.peak_bytes)]
        if ran.plan is not None:
            profiled, preset = ran.plan.predicted, predicted_on(self.prepared, ran.plan, self.preset)
            found += [
                f"{1e3 * profiled.step_seconds:.1f}",
                f"{100 * (profiled.step_seconds / middle - 1):+.0f} %",
                f"{100 * (preset.step_seconds / middle - 1):+.0f} %",
                show_bytes(profiled.peak_bytes),
                f"{(profiled.peak_bytes - ran.peak_bytes) / (1 << 20):+.1f} MiB",
                f"{(profiled.peak_bytes - ran.requested_bytes) / (1 << 20):+.1f} MiB",
            ]
        else:
            found += [""] * 6
        pairs = zip(ran.losses, self.ran[0].losses, strict=False)
        return [*found, f"{max(abs(a - b) for a, b in pairs):.1g}"]

    def show(self) -> None:
        head = ["", "ms", "of plain", "peak", "predicted ms", "error", "preset's"]
        head += ["predicted peak", "error", "of requests", "loss off by"]
        how = self.options.precision + (", compiled" if self.options.compiled else "")
        print(f"\n{self.name}, {', '.join(str(tuple(t.shape)) for t in self.batch.values())}, {how}\n")
        rows = [self.cells(ran) for ran in self.ran]
        print(*table(rows, "<" + ">" * 10, head=head, indent=0, width=160), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all but the tiny one without any")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--precision", choices=("pure-bf16", "bf16"), default="pure-bf16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-budgets", action="store_true", help="the plain model and the plan without a budget alone")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each")
    parser.add_argument("--profile-seconds", type=float, default=20.0)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    mesh = init_device_mesh(options.device, (1,), mesh_dim_names=("ranks",))
    cluster = measure_host(mesh, seconds=options.profile_seconds)
    device = cluster.device
    rates = ", ".join(f"{name} {rate / 1e12:.1f}" for name, rate in device.flops_per_s.items())
    print(
        f"{device.name}, torch {torch.__version__}: TFLOP/s {rates}; attention {100 * device.attention:.0f} % of that, "
        f"pointwise {device.bytes_per_s / 1e9:.0f} GB/s, optimizer {(device.update_bytes_per_s or 0) / 1e9:.0f} GB/s, "
        f"{1e6 * device.launch_seconds:.1f} µs an op"
    )
    preset = Cluster.of(mesh)
    for name in options.models or [n for n in MODELS if n != "tiny"]:
        bench = Bench(name, mesh, cluster, preset, Options(options.precision, options.compile, options.steps))
        if options.no_budgets:
            bench.without_budget()
        else:
            bench.all()
        bench.show()
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
