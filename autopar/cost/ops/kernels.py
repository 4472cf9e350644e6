"""Corrections for ops whose kernels on the target device differ from what the op does on the meta device.

A row, keyed by (op, device type), says what the device's kernel saves for backward and does; all other ops count as
measured. Rows for the CPU are compared with real runs in tests. A row is called with the op's outputs and arguments
(data-free, at global shapes) and returns None if the kernel does not apply to this call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format  # private, but it decides as the kernels do

from autopar.cost.ops.measure import touched_bytes


@dataclass(frozen=True)
class Kernel:
    """The figures that a row overrides; None leaves the measured one.

    `saved`: inputs and outputs saved for backward; `internal_bytes`: what is saved beside them. `causal`: the part of
    the model's FLOPs that forward does. `backward_passes`: backward FLOPs over forward FLOPs. `moved_*`: the bytes that
    one kernel moves in each direction. `output`: the output with the strides that the kernel gives it. `attention`: the
    device's rate for attention applies. `workspace_backward`: bytes of temporaries in backward.
    """

    saved: tuple[Tensor, ...] | None = None
    internal_bytes: int | None = None
    causal: float = 1.0
    backward_passes: float | None = None
    moved_forward: int | None = None
    moved_backward: int | None = None
    attention: bool = False
    output: Tensor | None = None
    workspace_backward: int = 0

    @property
    def at_once(self) -> bool:
        """Whether the op is a single kernel, with no temporaries but `workspace_backward`."""
        return self.moved_forward is not None


Row = Callable[..., Kernel | None]
_SHARES_ON_CPU = torch.__version__ >= "2.14"  # from then on also fused: no batch dim, or one key head for all heads


def _attention(
    fused: Callable[..., bool], output_like: Callable[[Tensor, Tensor, Tensor | None], Tensor], *, sums_in_single: bool
) -> Row:
    """A row for fused attention: it saves q, k, v, the output and the log-sum-exp, but never the score matrix.

    Its backward recomputes the scores: five products where forward has two (2307.08691, section 3.1.2).
    A boolean mask is converted to the query's dtype, and the converted one saved; a floating mask is saved itself.
    The output's strides decide whether merging the heads afterwards copies it. `sums_in_single`: the gradient of
    queries in half precision is accumulated in float32 in memory (`dq_accum` of FlashAttention-2's backward).
    """

    def row(
        outputs: Sequence[Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Kernel | None:
        if not fused(query, key, value, attn_mask, dropout_p, enable_gqa):
            return None
        statistics = torch.float64 if query.dtype == torch.float64 else torch.float32
        internal = math.prod(query.shape[:-1]) * statistics.itemsize
        kept: tuple[Tensor, ...] = (query, key, value, *outputs)
        read = sum(map(touched_bytes, (query, key, value)))
        if attn_mask is not None:
            mask_bytes = attn_mask.numel() * query.element_size()
            read += mask_bytes
            if attn_mask.dtype == torch.bool:
                internal += mask_bytes
            else:
                kept += (attn_mask,)
        written = sum(map(touched_bytes, outputs))
        return Kernel(
            saved=kept,
            internal_bytes=internal,
            causal=0.5 if is_causal else 1.0,
            backward_passes=2.5,
            moved_forward=read + written,
            moved_backward=2 * (read + written),
            attention=True,
            output=output_like(query, value, attn_mask),
            workspace_backward=4 * query.numel() if sums_in_single and query.dtype.itemsize == 2 else 0,
        )

    return row


def _in_rows(*tensors: Tensor) -> bool:
    return all(t.dim() == 4 and t.stride(-1) == 1 and t.numel() > 0 for t in tensors)


def _same_head_dims(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return _in_rows(query, key, value) and query.shape[-1] == key.shape[-1] == value.shape[-1]


def _heads_fit(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> bool:
    """Whether the fused kernel takes these heads: equally many, or grouped. Otherwise the unfused path broadcasts
    them."""
    return (query.dim() == 4 and grouped) or query.shape[:-2] == key.shape[:-2] == value.shape[:-2]


def _one_for_all_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return query.shape[:-3] == key.shape[:-3] == value.shape[:-3] and key.shape[-3:-2] == value.shape[-3:-2] == (1,)


def _fused_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, grouped: bool
) -> bool:
    """The conditions of `use_flash_attention_cpp` in ATen's `sdp_utils_cpp.cpp`."""
    if not _heads_fit(query, key, value, grouped) and not (_SHARES_ON_CPU and _one_for_all_heads(query, key, value)):
        return False
    if _SHARES_ON_CPU and query.dim() == key.dim() == value.dim() == 3:
        query, key, value = query[None], key[None], value[None]
    return _same_head_dims(query, key, value) and dropout_p == 0.0 and not (mask is not None and mask.requires_grad)


def _fused_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, grouped: bool
) -> bool:
    """Whether flash, memory-efficient or cuDNN attention runs, by the conditions of ATen's `sdp_utils.cpp`; all three
    save the same tensors."""
    if not _heads_fit(query, key, value, grouped):
        return False
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if _same_head_dims(query, key, value) and query.shape[-1] <= 256:
        return True
    return _memory_efficient(query, key, value)


def _memory_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the memory-efficient kernel takes the call: equally many heads, rows that are multiples of 16 bytes. The
    value's head dim may differ (DeepSeek)."""
    return (
        _in_rows(query, key, value)
        and query.shape[1] == key.shape[1] == value.shape[1]
        and query.shape[-1] == key.shape[-1]
        and all(t.shape[-1] * t.dtype.itemsize % 16 == 0 for t in (query, key, value))
    )


def _as_query(query: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """The CPU's kernel gives its output the strides of the query."""
    return torch.empty_like(query)


def _on_cuda(query: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Flash too gives its output the query's strides; the memory-efficient kernel writes (batch, sequence, heads, head
    dim of the value) contiguously."""
    if mask is None and query.dtype.itemsize == 2 and query.shape[-1] == value.shape[-1] <= 256:
        return torch.empty_like(query)
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)


def _dropout_on_cuda(
    outputs: Sequence[Tensor], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Kernel | None:
    """`native_dropout` saves a mask of one byte per element."""
    if not training or not 0.0 < p < 1.0:
        return None
    once = 2 * touched_bytes(input) + input.numel()
    return Kernel(saved=(), internal_bytes=input.numel(), moved_forward=once, moved_backward=once)


def _rms_norm_on_cuda(
    outputs: Sequence[Tensor],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Kernel:
    """One kernel that saves input, weight and one float32 for each row; on other devices it is a chain of pointwise
    ops."""
    rows = input.numel() // max(math.prod(normalized_shape), 1)
    kept = (input,) if weight is None else (input, weight)
    once = 2 * touched_bytes(input)
    return Kernel(kept, 4 * rows, moved_forward=once, moved_backward=once + touched_bytes(input))


def _layer_norm_on_cpu(
    outputs: Sequence[Tensor],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Kernel | None:
    """For half precision, the saved mean and reciprocal deviation have the input's dtype, unless the weight is float32:
    then they are too."""
    if input.dtype.itemsize >= 4 or (weight is not None and weight.dtype != input.dtype):
        return None
    rows = input.numel() // max(math.prod(normalized_shape), 1)
    return Kernel(internal_bytes=2 * rows * input.element_size())


def _batch_norm(
    outputs: Sequence[Tensor],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Kernel | None:
    """Outside training, the running statistics are used: no statistics are computed or saved."""
    return None if training else Kernel(internal_bytes=0)


def _batch_norm_on_cpu(outputs: Sequence[Tensor], input: Tensor, *others: Any, **more: Any) -> Kernel:
    """The output is contiguous, or channels-last if the input is. So a tensor that is transposed for the norm and back
    is not contiguous, and every product that reads it copies it."""
    anywhere = _batch_norm(outputs, input, *others, **more) or Kernel()
    return replace(anywhere, output=_in_format(outputs[0], _channels_last(input)))


def _convolution_on_cpu(outputs: Sequence[Tensor], input: Tensor, weight: Tensor, *others: Any, **more: Any) -> Kernel:
    """oneDNN writes a channels-last output if the input or the weight is channels-last; with five dims, it does not
    support float64."""
    by_onednn = outputs[0].dim() == 4 or input.dtype in (torch.float32, torch.bfloat16)
    return Kernel(output=_in_format(outputs[0], by_onednn and (_channels_last(input) or _channels_last(weight))))


def _channels_last(tensor: Tensor) -> bool:
    """Whether a tensor of four or five dims is channels-last."""
    return suggest_memory_format(tensor) in (torch.channels_last, torch.channels_last_3d)


def _in_format(output: Tensor, channels_last: bool) -> Tensor:
    """The output with contiguous or channels-last strides."""
    of_dims = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = of_dims.get(output.dim(), torch.contiguous_format) if channels_last else torch.contiguous_format
    return torch.empty_like(output, memory_format=last)


ROWS: dict[tuple[Any, str], Row] = {
    (F.scaled_dot_product_attention, "cpu"): _attention(_fused_on_cpu, _as_query, sums_in_single=False),
    (F.scaled_dot_product_attention, "cuda"): _attention(_fused_on_cuda, _on_cuda, sums_in_single=True),
    (F.dropout, "cuda"): _dropout_on_cuda,
    (torch.dropout, "cuda"): _dropout_on_cuda,
    (F.rms_norm, "cuda"): _rms_norm_on_cuda,
    (torch.rms_norm, "cuda"): _rms_norm_on_cuda,
    (F.layer_norm, "cpu"): _layer_norm_on_cpu,
    (torch.layer_norm, "cpu"): _layer_norm_on_cpu,
    (F.batch_norm, "cpu"): _batch_norm_on_cpu,
    (F.batch_norm, "cuda"): _batch_norm,
    (torch.conv2d, "cpu"): _convolution_on_cpu,
    (torch.conv3d, "cpu"): _convolution_on_cpu,
    (torch.conv_transpose2d, "cpu"): _convolution_on_cpu,
    (torch.conv_transpose3d, "cpu"): _convolution_on_cpu,
}


def has_row(target: Any, device_kind: str) -> bool:
    """Whether an op has a row for this device (a target that is not hashable has none)."""
    return isinstance(target, Hashable) and (target, device_kind) in ROWS


def kernel(target: Any, device_kind: str, outputs: Sequence[Tensor], args: Any, kwargs: Any) -> Kernel | None:
    """The row's figures for one call; None if the device does what the meta device does."""
    return ROWS[target, device_kind](outputs, *args, **kwargs) if has_row(target, device_kind) else None
