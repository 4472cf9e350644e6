"""The table's rows for the CPU against real runs: what each op saves, and the strides of its output."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorded import counted_saved_bytes, graph_of_call

from autopar.cost import annotate, saved_bytes
from autopar.cost.ops.kernels import ROWS
from autopar.cost.ops.workspace import measure_workspace
from autopar.graph import COST, VAL


def tensors(value: Any, device: str) -> Any:
    if isinstance(value, Spec):
        return value.make(device)
    return value


class Spec:
    """Describes a tensor that is then created on the meta device and on the CPU."""

    def __init__(
        self,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        grad: bool = True,
        swap: bool = False,
        last: bool = False,
    ) -> None:
        self.shape, self.dtype, self.grad, self.swap, self.last = shape, dtype, grad, swap, last

    def make(self, device: str) -> torch.Tensor:
        made = torch.ones(self.shape, dtype=self.dtype, device=device)
        made = made.transpose(1, 2) if self.swap else made
        if self.last:
            made = made.to(memory_format=torch.channels_last if made.dim() == 4 else torch.channels_last_3d)
        return made.requires_grad_(self.grad)


def heads(*shape: int, **how: Any) -> Spec:
    return Spec(*(shape or (2, 4, 16, 8)), **how)


def mask(*shape: int, dtype: torch.dtype = torch.bool) -> Spec:
    return Spec(*shape, dtype=dtype, grad=False)


ATTENTION = F.scaled_dot_product_attention
STATS = (Spec(3, grad=False), Spec(3, grad=False))
CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "attention": (ATTENTION, (heads(), heads(), heads()), {}),
    "causal": (ATTENTION, (heads(), heads(), heads()), {"is_causal": True}),
    "heads swapped in": (ATTENTION, tuple(heads(2, 16, 4, 8, swap=True) for _ in "qkv"), {"is_causal": True}),
    "bf16": (ATTENTION, tuple(heads(dtype=torch.bfloat16) for _ in "qkv"), {}),
    "float64": (ATTENTION, tuple(heads(dtype=torch.float64) for _ in "qkv"), {}),
    "longer keys": (ATTENTION, (heads(), heads(2, 4, 24, 8), heads(2, 4, 24, 8)), {}),
    "grouped queries": (ATTENTION, (heads(), heads(2, 2, 16, 8), heads(2, 2, 16, 8)), {"enable_gqa": True}),
    "one key for all heads": (ATTENTION, (heads(), heads(2, 1, 16, 8), heads(2, 1, 16, 8)), {}),
    "boolean mask": (ATTENTION, (heads(), heads(), heads(), mask(2, 1, 16, 16)), {}),
    "boolean mask of two dims": (ATTENTION, (heads(), heads(), heads(), mask(16, 16)), {}),
    "floating mask": (ATTENTION, (heads(), heads(), heads(), mask(2, 4, 16, 16, dtype=torch.float32)), {}),
    "mask that trains": (ATTENTION, (heads(), heads(), heads()), {"attn_mask": Spec(1, 4, 16, 16)}),
    "attention dropout": (ATTENTION, (heads(), heads(), heads()), {"dropout_p": 0.5}),
    "three dims": (ATTENTION, tuple(Spec(4, 16, 8) for _ in "qkv"), {}),
    "three dims, one key for all heads": (ATTENTION, (Spec(4, 16, 8), Spec(1, 16, 8), Spec(1, 16, 8)), {}),
    "a key without heads": (ATTENTION, (Spec(4, 16, 8), Spec(16, 8), Spec(16, 8)), {}),
    "other value width": (ATTENTION, (heads(), heads(), heads(2, 4, 16, 12)), {}),
    "only values train": (ATTENTION, (heads(grad=False), heads(grad=False), heads()), {}),
    "nothing trains": (ATTENTION, tuple(heads(grad=False) for _ in "qkv"), {}),
    "layer norm": (F.layer_norm, (Spec(4, 8), (8,), Spec(8), Spec(8)), {}),
    "layer norm, bf16": (F.layer_norm, (Spec(4, 8, dtype=torch.bfloat16), (8,)), {}),
    "layer norm, bf16 with float32 weights": (
        F.layer_norm,
        (Spec(4, 8, dtype=torch.bfloat16), (8,), Spec(8), Spec(8)),
        {},
    ),
    "batch norm, transposed": (F.batch_norm, (Spec(4, 8, 3, swap=True), *STATS, Spec(3), Spec(3), True), {}),
    "batch norm, channels last": (F.batch_norm, (Spec(4, 3, 8, 8, last=True), *STATS, Spec(3), Spec(3), True), {}),
    "batch norm, training": (F.batch_norm, (Spec(4, 3, 8, 8), *STATS, Spec(3), Spec(3), True), {}),
    "batch norm, eval": (F.batch_norm, (Spec(4, 3, 8, 8), *STATS, Spec(3), Spec(3), False), {}),
    "convolution": (torch.conv2d, (Spec(4, 3, 8, 8), Spec(6, 3, 3, 3)), {}),
    "convolution, channels last": (torch.conv2d, (Spec(4, 3, 8, 8, last=True), Spec(6, 3, 3, 3)), {}),
    "convolution, weight's channels last": (torch.conv2d, (Spec(4, 3, 8, 8), Spec(6, 3, 3, 3, last=True)), {}),
    "transposed convolution": (torch.conv_transpose2d, (Spec(4, 3, 8, 8, last=True), Spec(3, 6, 2, 2)), {}),
    "convolution of three dims": (torch.conv3d, (Spec(4, 3, 4, 8, 8, last=True), Spec(6, 3, 3, 3, 3)), {}),
    "convolution of three dims, float64": (
        torch.conv3d,
        (Spec(4, 3, 4, 8, 8, last=True, dtype=torch.float64), Spec(6, 3, 3, 3, 3, dtype=torch.float64)),
        {},
    ),
    "transposed convolution of three dims": (
        torch.conv_transpose3d,
        (Spec(4, 3, 4, 8, 8, last=True), Spec(3, 6, 2, 2, 2)),
        {},
    ),
    "rms norm": (F.rms_norm, (Spec(4, 8), (8,), Spec(8)), {}),
    "dropout": (F.dropout, (Spec(4, 8), 0.3), {}),
    "dropout, bf16": (F.dropout, (Spec(4, 8, dtype=torch.bfloat16), 0.3), {}),
    "dropout, eval": (F.dropout, (Spec(4, 8), 0.3, False), {}),
    "cross entropy": (F.cross_entropy, (Spec(4, 8), Spec(4, dtype=torch.long, grad=False)), {}),
    "max pool": (F.max_pool2d, (Spec(2, 3, 8, 8), 3, 2, 1), {}),
    "group norm": (F.group_norm, (Spec(2, 4, 8, 8), 2, Spec(4), Spec(4)), {}),
    "embedding": (F.embedding, (Spec(4, dtype=torch.long, grad=False), Spec(10, 8)), {}),
    "standard deviation": (torch.std, (Spec(4, 8), -1), {}),
    "scaled exponential": (F.selu, (Spec(4, 8),), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_real_run_keeps_as_many_bytes_and_lies_alike(name: str) -> None:
    target, args, kwargs = CALLS[name]
    node = graph_of_call(
        target, *[tensors(a, "meta") for a in args], **{k: tensors(v, "meta") for k, v in kwargs.items()}
    )
    annotate(node.graph, "cpu")
    real = [tensors(a, "cpu") for a in args]
    named = {key: tensors(value, "cpu") for key, value in kwargs.items()}
    output: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        output.append(target(*real, **named))
        return output[0]

    owned = [t for t in (*real, *named.values()) if isinstance(t, torch.Tensor)]
    assert saved_bytes(node.graph) == counted_saved_bytes(run, owned)
    assert not node.meta[COST].estimated
    assert node.meta[VAL].stride() == output[0].stride()


def test_every_row_for_the_cpu_is_among_the_calls() -> None:
    named = {target for target, _, _ in CALLS.values()} | {
        torch.layer_norm
    }  # F.layer_norm calls it with the same arguments
    assert {target for target, kind in ROWS if kind == "cpu"} <= named


def test_attention_that_is_not_fused_makes_scores_for_a_moment() -> None:
    """Value heads of another size than key heads, as in DeepSeek: gradients of scores and of probabilities coexist."""
    shapes = (2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 12)
    node = graph_of_call(ATTENTION, *(torch.empty(s, device="meta", requires_grad=True) for s in shapes))
    annotate(node.graph, "cpu")
    real = measure_workspace(lambda: ATTENTION(*given), given := [torch.ones(s, requires_grad=True) for s in shapes])
    cost = node.meta[COST]
    assert (cost.workspace_forward_bytes, cost.workspace_backward_bytes) == (real.forward_bytes, real.backward_bytes)
    assert real.backward_bytes >= 2 * 4 * 16 * 16 * 4


@pytest.mark.parametrize("op", [F.dropout, torch.dropout])
def test_a_dropout_mask_is_one_byte_an_element_on_cuda(op: Any) -> None:
    node = graph_of_call(op, torch.empty(4, 8, device="meta", requires_grad=True), 0.3, True)
    annotate(node.graph, "cuda")
    assert node.meta[COST].saved_internal_bytes == 32
    assert node.meta[COST].saved_inputs == ()


def test_rms_norm_is_one_kernel_on_cuda() -> None:
    x, w = torch.empty(4, 8, device="meta", requires_grad=True), torch.empty(8, device="meta", requires_grad=True)
    node = graph_of_call(F.rms_norm, x, (8,), w)
    annotate(node.graph, "cuda")
    cost = node.meta[COST]
    assert (cost.saved_inputs, cost.saved_internal_bytes, cost.work.kernels_forward) == ((0, 1), 4 * 4, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_on_cuda_keeps_no_scores(dtype: torch.dtype) -> None:
    q = torch.empty(2, 16, 4, 8, device="meta", dtype=dtype, requires_grad=True).transpose(1, 2)
    node = graph_of_call(ATTENTION, q, q.clone(), q.clone(), is_causal=True)
    annotate(node.graph, "cuda")
    cost = node.meta[COST]
    assert (cost.saved_inputs, cost.saved_outputs, cost.saved_internal_bytes) == ((0, 1, 2), (0,), 2 * 4 * 16 * 4)
    assert node.meta[VAL].stride() == (16 * 4 * 8, 8, 4 * 8, 1)
    assert cost.workspace_backward_bytes == (0 if dtype == torch.float32 else 4 * q.numel()), (
        "gradients of q in float32"
    )


@pytest.mark.parametrize("causal", [False, True])
def test_attention_on_cuda_skips_what_is_masked_and_computes_scores_again(causal: bool) -> None:
    """Two products in forward and five in backward, halved if causal; one kernel in each direction."""
    q = torch.empty(2, 4, 16, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    node = graph_of_call(ATTENTION, q, q.clone(), q.clone(), is_causal=causal)
    annotate(node.graph, "cuda")
    cost, product = node.meta[COST], 2 * q.numel() * 16
    assert (cost.flops_forward, cost.flops_backward) == (2 * product, 4 * product), "the model's"
    done = (cost.work.flops_forward, cost.work.flops_backward)
    assert done == ((product, 2.5 * product) if causal else (2 * product, 5 * product))
    assert (cost.moved_bytes_forward, cost.moved_bytes_backward) == (4 * q.nbytes, 8 * q.nbytes)


def test_attention_that_drops_keeps_no_scores_on_cuda() -> None:
    """Fused kernels draw the dropout mask while they run, and draw it again in backward."""
    q = torch.empty(2, 4, 16, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    node = graph_of_call(ATTENTION, q, q.clone(), q.clone(), dropout_p=0.1)
    annotate(node.graph, "cuda")
    assert node.meta[COST].saved_internal_bytes <= 2 * 4 * 16 * 4 + 64


@pytest.mark.parametrize(
    ("of_keys", "of_values", "fused"), [(24, 16, True), (16, 24, True), (24, 12, False), (12, 12, True)]
)
def test_values_may_have_heads_of_another_size_on_cuda(of_keys: int, of_values: int, fused: bool) -> None:
    """As in DeepSeek: the memory-efficient kernel runs, which reads 16 bytes at a time."""
    q = torch.empty(2, 4, 16, of_keys, device="meta", dtype=torch.bfloat16, requires_grad=True)
    v = torch.empty(2, 4, 16, of_values, device="meta", dtype=torch.bfloat16, requires_grad=True)
    node = graph_of_call(ATTENTION, q, q.clone(), v, is_causal=True)
    annotate(node.graph, "cuda")
    cost = node.meta[COST]
    assert (cost.saved_internal_bytes == 2 * 4 * 16 * 4) is fused, "one float32 a query in place of its scores"
    if of_keys != of_values and fused:
        assert node.meta[VAL].stride() == (16 * 4 * of_values, of_values, 4 * of_values, 1)
