"""Bytes of model states, optimizers and saved activations, against ZeRO's formulas, torch's optimizers, real steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_models import IDS, bert, gpt2, llama, resnet, vit
from torch import fx, nn
from torch.nn import functional as F

from autopar.cost import annotate
from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.moments import moments_of
from autopar.cost.memory.optimizer_step import successive, temporaries
from autopar.cost.memory.planned_bytes import PlannedBytes
from autopar.cost.memory.transfer_bytes import transfer_bytes
from autopar.cost.ops.workspace import LiveBytes
from autopar.cost.structure.blocks import find_repeats
from autopar.graph import TensorRef, tensor_of
from autopar.layout import Layout
from autopar.plans import ParameterPlan
from autopar.precision import Precision
from autopar.strategies import strategies_for
from autopar.tracing import trace


class Lion(torch.optim.Optimizer):
    """As lion-pytorch writes it (arXiv 2302.06675)."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("average", torch.zeros_like(parameter))
            self._update(parameter, parameter.grad, state["average"])

    @staticmethod
    def _update(parameter: torch.Tensor, gradient: torch.Tensor, average: torch.Tensor) -> None:
        update = average.clone().mul_(0.9).add(gradient, alpha=0.1).sign_()
        parameter.add_(update, alpha=-1e-3)
        average.mul_(0.99).add_(gradient, alpha=0.01)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for matrices, AdamW for other parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        others = [p for p in parameters if p.ndim != 2]
        self.both = [torch.optim.Muon([p for p in parameters if p.ndim == 2])]
        self.both += [torch.optim.AdamW(others)] if others else []

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self.both:
            optimizer.step()
            self.state.update(optimizer.state)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "lion": Lion,
    "muon": MuonAndAdamW,
}
RANKS = 4


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64, 32, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight).square().mean()


def memory_of(model: nn.Module, inputs: dict[str, torch.Tensor], **options: object) -> StepMemory:
    precision = options.pop("precision", Precision())
    assert isinstance(precision, Precision)
    traced = trace(model, inputs, bias_addition_split=True, remove_inplace=True, parameter_dtype=precision.compute)
    kind = str(options.pop("kind", "cpu"))
    annotate(traced.graph, kind, root=traced.root)
    given: dict[str, object] = {"mesh_shape": (1,), "optimizer": "adamw", "micro_batches": 1, **options}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return StepMemory(traced.graph, parameters, precision=precision, device_kind=kind, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", range(4))
def test_zero(stage: int) -> None:
    """1910.02054, section 3: 2 + 2 + 12 bytes for each parameter in mixed precision; each stage shards one more part.

    Whole storage is stage 0. Sharded storage that stays gathered between forward and backward is stage 2, and stage 1
    if gradients of several micro-batches wait unreduced. Sharded master weights are the stored parameters themselves.
    """
    whole = stage == 0
    mixed = Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32)
    precision = mixed if whole or stage == 3 else Precision(torch.float32, torch.bfloat16, torch.bfloat16)
    memory = memory_of(
        Product(),
        {"x": torch.empty(8, 32, device="meta")},
        precision=precision,
        mesh_shape=(RANKS,),
        micro_batches=2 if stage == 1 else 1,
    )
    [node] = [n for n in memory.graph.nodes if memory.is_parameter(n)]
    ref, elements = TensorRef(node, 0), 64 * 32
    storage, wanted = Layout.parse("R" if whole else "S0"), Layout.parse("R+")
    moved = transfer_bytes(memory, Grouping(memory, ()), ref, storage, wanted, regather=stage == 3)
    found = sum(memory.parameter_bytes(node, storage).values())
    if stage in (1, 2):  # the copy in the compute dtype lives as long as the activations
        found += memory.read_bytes(node, storage, wanted)
    found += moved.accumulated if stage == 1 else moved.reduced
    divided = {0: 16, 1: 4 + 12 / RANKS, 2: 2 + 14 / RANKS, 3: 16 / RANKS}[stage]
    assert found == divided * elements


@pytest.mark.parametrize("bias", [True, False], ids=["biases between", "weights in a row"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_and_transients_are_those_of_torch(optimizer: str, *, bias: bool) -> None:
    """While the optimizer updates a parameter, it still holds the last temporary of the previous one."""
    model = nn.Sequential(nn.Linear(96, 64, bias), nn.Linear(64, 160, bias))
    memory = memory_of(model, {"input": torch.empty(8, 96)}, optimizer=optimizer)
    nodes = [n for n in memory.graph.nodes if memory.is_parameter(n)]
    whole = Layout.parse("R")
    torchs = OPTIMIZERS[optimizer](list(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torchs.step()
    states = [t for state in torchs.state.values() for key, t in state.items() if torch.is_tensor(t) and key != "step"]
    assert sum(memory.parameter_bytes(n, whole)["optimizer state"] for n in nodes) == sum(t.nbytes for t in states)
    live = LiveBytes()
    live.given([*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *states])
    with live:
        torchs.step()
    pairs = list(successive(memory))
    assert [str(node.target) for _, node in pairs] == [name for name, _ in model.named_parameters()]
    each = {node: temporaries(memory, node, whole) for node in nodes}
    largest = max((each[before].left if before else 0) + each[node].own for before, node in pairs)
    biases = 1024 if optimizer == "muon" else 0  # AdamW has updated none before a matrix
    assert largest - biases <= live.peak_bytes <= largest + 4096, "scalars and, for Adafactor, rows and columns beside"


def test_a_storage_cut_in_two_ways_is_two_copies() -> None:
    """Views share a copy if they shard the storage alike, in whichever dims: heads of (b, h, s, e), width of (b, s,
    d)."""
    memory = memory_of(Heads(), {"x": torch.empty(8, 6, 64, device="meta", requires_grad=True)}, mesh_shape=(2,))
    merged, heads = (
        next(TensorRef(n, 0) for n in memory.graph.nodes if n.op.startswith("call") and tuple(shape(n)) == wanted)
        for wanted in ((8, 6, 64), (8, 4, 6, 16))
    )
    root = memory.roots[merged]
    assert memory.roots[heads] == root
    assert memory.copy(heads, Layout.parse("S1")) == memory.copy(merged, Layout.parse("S2"))
    assert memory.copy(heads, Layout.parse("S0")) == memory.copy(merged, Layout.parse("S0"))
    assert memory.copy(heads, Layout.parse("S0")) != memory.copy(heads, Layout.parse("S1"))
    assert memory.copy(heads, Layout.parse("P")) != memory.copy(heads, Layout.parse("R"))


class Heads(nn.Module):
    """Makes a tensor, and a view of it with its width split into heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return y.view(8, 6, 4, 16).transpose(1, 2).square().sum() + y.sum()


def shape(node: fx.Node) -> torch.Size:
    value = node.meta["val"]
    return value.shape if isinstance(value, torch.Tensor) else torch.Size(())


class Stacked(nn.Module):
    """Stacks the rows of several tables, whose gradients are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(16, 64) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([table(ids) for table in self.tables]).square().mean()


class Spectral(nn.Module):
    """The gradient of the input of an FFT is a view of half of a complex tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        return torch.fft.rfft(x).abs().mean() + F.gelu(x).mean()


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]] = {
    "stacked": (Stacked, {"ids": torch.arange(1024) % 16}),
    "spectral": (Spectral, {"x": torch.randn(64, 64)}),
    "gpt2": (gpt2, {"input_ids": IDS, "labels": IDS}),
    "llama": (llama, {"input_ids": IDS, "labels": IDS}),
    "bert": (bert, {"input_ids": IDS, "labels": IDS}),
    "vit": (vit, {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 0, 1])}),
    "resnet": (resnet, {"x": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 0, 1])}),
}


@pytest.mark.parametrize("name", CASES)
def test_peak_is_that_of_a_real_step(name: str) -> None:
    """One device: forward, backward and optimizer in eager mode, counting every storage while it lives."""
    build, batch = CASES[name]
    torch.manual_seed(0)
    model = build().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # a plan draws masks by other code, of other sizes
    memory = memory_of(model, batch)
    nodes = list(memory.graph.nodes)
    chosen = {node: options[0] for node, options in strategies_for(memory.graph, (1,)).items()}
    whole = Layout.parse("R")
    parameters = {
        str(n.target): ParameterPlan(str(n.target), tuple(tensor_of(TensorRef(n, 0)).shape), "float32", whole, True)
        for n in nodes
        if memory.is_parameter(n)
    }
    repeats = find_repeats(memory.graph)
    moments = moments_of(PlannedBytes(memory, chosen, parameters, (), repeats, Grouping(memory, repeats)))
    predicted = max(moment.total_bytes for moment in moments)

    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    states = [t for state in optimizer.state.values() for t in state.values()]
    there = [*model.parameters(), *model.buffers(), *states, *batch.values()]
    live = LiveBytes()
    live.given(there)
    with live:
        output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        optimizer.step()
    measured = live.peak_bytes + sum({t.untyped_storage()._cdata: t.nbytes for t in there}.values())
    assert predicted == pytest.approx(measured, rel=0.03)
