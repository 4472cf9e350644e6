"""Properties of a node's predicted seconds, and how closely they fit a published layer."""

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from recorded import graph_of_call

from autopar.cluster import Cluster, Device
from autopar.cost import annotate, node_seconds
from autopar.cost.ops.products import FAMILIES, busy_flops
from autopar.graph import BIAS_OF, COST, VAL, output_tensors, tensor_inputs
from autopar.layout import Layout
from autopar.tracing import trace

A100, CPU = Cluster.preset("a100", (8,)).device, Cluster.preset("cpu", (8,)).device


@dataclass(frozen=True)
class Sharded:
    """The attributes of a strategy that `node_seconds` reads."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    work: float = 1.0


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def sharded(inputs: str, outputs: str, work: float) -> Sharded:
    return Sharded(
        tuple(Layout.parse(text) for text in inputs.split()),
        tuple(Layout.parse(text) for text in outputs.split()),
        work,
    )


def seconds(
    target: Any, *args: Any, device: Device = A100, how: Sharded | None = None, mesh: Any = (8,), **kwargs: Any
) -> tuple[float, float]:
    node = graph_of_call(target, *args, **kwargs)
    annotate(node.graph, device.kind)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    how = how or sharded("R " * len(tensors), "R", 1.0)
    return node_seconds(node, how, device, mesh)


@pytest.mark.parametrize("split", ["S0 S0", "S1 R"], ids=["rows", "classes"])
def test_a_split_loss_takes_its_part(split: str) -> None:
    """Intermediate results are split like the inputs, although the loss itself, a scalar, is not."""
    args = meta(1 << 16, 1 << 15), torch.empty(1 << 16, dtype=torch.long, device="meta")
    whole, part = seconds(F.cross_entropy, *args), seconds(F.cross_entropy, *args, how=sharded(split, "P", 1 / 8))
    assert part == pytest.approx([s / 8 for s in whole], rel=1e-3)


def test_a_loss_takes_the_time_of_all_that_it_moves() -> None:
    args = meta(1 << 16, 1 << 15), torch.empty(1 << 16, dtype=torch.long, device="meta")
    node = graph_of_call(F.cross_entropy, *args)
    annotate(node.graph, A100.kind)
    moved = node.meta[COST].moved_bytes_forward
    assert moved > 2 * args[0].nbytes, "logarithms are written and read on the way"
    assert seconds(F.cross_entropy, *args)[0] == pytest.approx(moved / A100.bytes_per_s, rel=0.01)


def test_fused_attention_has_a_rate_of_its_own() -> None:
    slow, fast = (replace(A100, attention=rate) for rate in (0.1, 0.4))
    q = meta(4, 16, 4096, 128)
    both = [seconds(F.scaled_dot_product_attention, q, q, q, device=device) for device in (slow, fast)]
    assert both[0] == pytest.approx([4 * s for s in both[1]], rel=0.02)
    assert seconds(F.linear, q, meta(128, 128), device=slow) == seconds(F.linear, q, meta(128, 128), device=fast)


@pytest.mark.parametrize("device", [A100, CPU], ids=["a100", "cpu"])
def test_larger_products_take_longer(device: Device) -> None:
    sizes = [1, 8, 64, 512, 4096]
    for k, n in itertools.product(sizes, sizes):
        found = [seconds(F.linear, meta(m, k), meta(n, k), device=device) for m in sizes]
        assert found == sorted(found)


def test_large_products_reach_the_devices_efficiency_and_thin_ones_do_not() -> None:
    def reached(m: int, k: int, n: int) -> float:
        return 2 * m * k * n / seconds(F.linear, meta(m, k), meta(n, k))[0] / A100.flops_per_s["bfloat16"]

    assert A100.efficiency * 0.9 < reached(16384, 8192, 8192) < A100.efficiency
    assert reached(16384, 32, 8192) < 0.5 * A100.efficiency
    assert reached(64, 8192, 1024) < 0.5 * A100.efficiency
    assert reached(64, 512, 512) < 0.1 * A100.efficiency


@pytest.mark.parametrize(
    ("dtype", "off"), [(torch.bfloat16, 1), (torch.float16, 2), (torch.bfloat16, 4), (torch.float32, 1)], ids=str
)
def test_rows_that_are_not_aligned_make_a_gpus_products_slow(dtype: torch.dtype, off: int) -> None:
    """A vocabulary that is no multiple of eight slows down forward and backward; a convolution has no such rows."""
    part = dict(FAMILIES["cuda"].unaligned)[off] if dtype.itemsize == 2 else 1.0
    x, w, odd = (meta(*shape, dtype=dtype) for shape in ((8192, 768), (50304, 768), (50304 - off, 768)))
    for even, slow in zip(seconds(F.linear, x, w), seconds(F.linear, x, odd), strict=True):
        assert even / slow == pytest.approx(part, rel=0.05)
    image = meta(8, 64, 56, 56, dtype=dtype)
    even, slow = (seconds(F.conv2d, image, meta(n, 64, 3, 3, dtype=dtype))[0] for n in (256, 256 - off))
    assert slow == pytest.approx(even, rel=0.05)


def test_an_uneven_cut_leaves_one_device_rows_that_are_not_aligned() -> None:
    """Of 30522 columns, seven of eight devices have 3816, a multiple of eight, and one has 3810."""
    cut = sharded("R+ S0", "S1", 1 / 8)
    uneven, even = (seconds(F.linear, meta(8192, 1024), meta(n, 1024), how=cut)[0] for n in (30522, 8 * 3816))
    assert uneven > 2 * even


def test_a_wave_more_is_a_step_up_and_a_full_one_is_flat() -> None:
    """128 x 128 tiles of (m, 4096) x (4096, 128): up to 108 tiles run in one wave, more tiles take two."""
    waves = [seconds(F.linear, meta(128 * tiles, 4096), meta(128, 4096))[0] for tiles in (107, 108, 109, 215)]
    assert waves[0] == pytest.approx(waves[1], rel=0.02)
    assert waves[2] > 1.15 * waves[1]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_products_grow_with_every_length_and_are_never_less_than_their_part(kind: str) -> None:
    draw = random.Random(0)
    for _ in range(300):
        batch, m, n, k = (draw.choice((1, 2, 7)), *(draw.randint(1, 3000) for _ in range(3)))
        processors = draw.choice((1, 80, 108, 132))
        whole = busy_flops(kind, processors, batch, m, n, k)
        assert whole >= 2 * batch * m * n * k
        for longer in ((batch + 1, m, n, k), (batch, m + 1, n, k), (batch, m, n + 1, k), (batch, m, n, k + 1)):
            assert busy_flops(kind, processors, *longer) >= whole
        for d in (2, 8):
            for shard in ((batch, m / d, n, k), (batch, m, n / d, k), (batch, m, n, k / d)):
                assert d * busy_flops(kind, processors, *shard) >= whole * (1 - 1e-12)


def test_no_shard_takes_longer_than_the_whole_and_none_beats_its_part() -> None:
    x, w = meta(8192, 4096), meta(4096, 4096)
    whole = seconds(F.linear, x, w)
    for inputs, output in [("S0 R+", "S0"), ("R+ S0", "S1"), ("S1 S1", "P")]:
        shard = seconds(F.linear, x, w, how=sharded(inputs, output, 1 / 8))
        assert all(w / 8 <= s < w for s, w in zip(shard, whole, strict=True))


def test_a_replicated_weight_is_read_whole() -> None:
    """With few tokens a product is bound by reading its weight, which data parallelism does not split."""
    x, w = meta(64, 8192), meta(8192, 8192)
    split = seconds(F.linear, x, w, how=sharded("R+ S0", "S1", 1 / 8))
    replicated = seconds(F.linear, x, w, how=sharded("S0 R+", "S0", 1 / 8))
    assert replicated[0] > 1.5 * split[0]


def test_nothing_is_faster_than_a_launch_but_a_view() -> None:
    assert seconds(torch.add, meta(1), meta(1))[0] == A100.launch_seconds
    assert seconds(torch.t, meta(8, 8)) == (0.0, 0.0)


def test_lower_precision_is_never_slower() -> None:
    single, half = (
        seconds(F.linear, meta(2048, 2048, dtype=d), meta(2048, 2048, dtype=d)) for d in (torch.float32, torch.bfloat16)
    )
    assert half[0] < single[0]


def test_causal_attention_does_half_and_its_backward_computes_scores_again() -> None:
    q = meta(4, 32, 8192, 128)
    full = seconds(F.scaled_dot_product_attention, q, q, q)
    causal = seconds(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    assert causal[0] == pytest.approx(full[0] / 2, rel=0.02)
    assert causal[1] == pytest.approx(2.5 * causal[0], rel=0.02)


def test_fused_attention_moves_no_score_matrix() -> None:
    q = meta(1, 8, 4096, 64)
    node = graph_of_call(F.scaled_dot_product_attention, q, q, q)
    annotate(node.graph, "cuda")
    assert node.meta["cost"].moved_bytes_forward == 4 * q.numel() * q.element_size()


def test_a_bias_costs_an_addition_where_its_product_is_a_partial_sum_only() -> None:
    node = graph_of_call(F.linear, meta(512, 4096), meta(4096, 4096))
    bias = node.graph.placeholder("bias")
    bias.meta[VAL] = meta(4096)
    addition = node.graph.call_function(torch.add, (node, bias))
    addition.meta.update({VAL: meta(512, 4096), BIAS_OF: node})
    annotate(node.graph, "cuda")
    partial = sharded("S1 S1", "P", 1 / 8)
    alone = node_seconds(addition, sharded("S1 S0", "S1", 1 / 8), A100, (8,))
    assert alone[0] == 0.0
    assert alone[1] > 0.0
    with_bias = node_seconds(node, partial, A100, (8,))[0]
    del addition.meta[BIAS_OF]
    without = node_seconds(node, partial, A100, (8,))[0]
    assert with_bias - without == pytest.approx(node_seconds(addition, sharded("R R", "R", 1.0), A100, (8,))[0])


@pytest.mark.parametrize(("batch", "published_ms"), [(1, 4.396), (4, 4.124), (8, 3.937)])
def test_a_layer_of_llama2_7b_takes_what_was_measured(batch: int, published_ms: float) -> None:
    """Forward of one layer, 2048 tokens, bf16, one A100-class GPU (computation profile of Hetu-Galvatron)."""

    def forward_seconds(layers: int) -> float:
        with torch.device("meta"):
            config = transformers.LlamaConfig(num_hidden_layers=layers, attn_implementation="sdpa")  # Llama2-7B's sizes
            model, ids = transformers.LlamaForCausalLM(config).train(), torch.zeros(batch, 2048, dtype=torch.long)
        graph = trace(model, meta_args={"input_ids": ids}, parameter_dtype=torch.bfloat16).graph
        annotate(graph, "cuda")
        whole = Layout.parse("R")
        return sum(
            node_seconds(n, Sharded((whole,) * len(tensor_inputs(n)), (whole,) * len(output_tensors(n))), A100, (1,))[0]
            for n in graph.nodes
        )

    layer = (forward_seconds(2) - forward_seconds(1)) / batch
    assert layer == pytest.approx(published_ms * 1e-3, rel=0.2)
