"""A case for each name of the table that `rule_cases` lacks, as the name shares its rule's text with others."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from rule_tensors import DRAWS, const, ids, mask, positive, tied, weights, x

Case = tuple[Any, ...]
_ATEN = torch.ops.aten

_SMOOTH = """mish sigmoid hardtanh hardswish hardsigmoid relu6 elu selu celu leaky_relu softplus softsign softshrink
 hardshrink tanhshrink"""
_METHODS = """exp exp2 expm1 log log2 log10 log1p sqrt reciprocal square abs absolute sign sgn sin cos tan asin acos
 atan sinh cosh asinh acosh atanh erf erfc erfinv floor ceil round trunc frac logit isnan isinf isfinite isneginf
 isposinf logical_not nan_to_num lgamma digamma signbit deg2rad rad2deg negative positive conj cpu float int long bool
 ravel adjoint prod all any argmin std logsumexp count_nonzero"""
_PAIRS = """rpow float_power minimum fmax fmin atan2 remainder fmod ne lt le gt ge logical_and
 logical_or logical_xor hypot xlogy logaddexp isclose subtract radd rsub multiply rmul divide true_divide"""
_INTEGERS = "bitwise_and bitwise_or bitwise_xor rand ror rxor"
_WINDOW = torch.hann_window(12, dtype=torch.float64)
_TRANSFORMS = "fft2 ifft ifft2 ifftn rfft2 rfftn irfft irfftn hfft hfft2 hfftn ihfft ihfft2 ihfftn"


def _method(name: str) -> str:
    """The name of a method as an attribute of Tensor."""
    return name if hasattr(torch.Tensor, name) else f"__{name}__"


def _margins() -> list[Case]:
    """Losses with a margin and count losses, for each reduction; labels are 1 and -1."""
    signs = const(12).sign()
    cases: list[Case] = []
    for reduction in ("mean", "sum", "none"):
        given = {"reduction": reduction, "margin": 0.3}
        cases += [
            (F.cosine_embedding_loss, x(12, 6), x(12, 6), signs, given),
            (F.triplet_margin_loss, x(12, 6), x(12, 6), x(12, 6), {**given, "swap": True}),
            (F.margin_ranking_loss, x(12), x(12), signs, given),
            (F.hinge_embedding_loss, x(6, 12), const(6, 12).sign(), given),
            (F.soft_margin_loss, x(6, 12), const(6, 12).sign(), {"reduction": reduction}),
            (F.multi_margin_loss, x(12, 6), ids(6, 12), {**given, "weight": const(6).exp()}),
            (F.multi_margin_loss, x(12, 6), ids(6, 12), given),
            (F.multilabel_soft_margin_loss, x(12, 6), const(12, 6).sigmoid(), {"reduction": reduction}),
            (F.multilabel_margin_loss, x(12, 6), const(12, 6).argsort(-1), {"reduction": reduction}),
            (F.poisson_nll_loss, x(6, 12), const(6, 12).exp(), {"reduction": reduction, "full": True}),
        ]
    return cases


def _elementwise() -> list[Case]:
    cases: list[Case] = [(getattr(F, name), x(6, 12)) for name in _SMOOTH.split()]
    along: dict[str, tuple[Any, ...]] = {"logsumexp": (1,), "count_nonzero": (1,)}
    cases += [(_method(name), positive(6, 12), *along.get(name, ())) for name in _METHODS.split()]
    cases += [(_method(name), positive(6, 12), positive(12)) for name in _PAIRS.split()]
    cases += [(_method(name), positive(6, 12), 2.0) for name in ("rpow", "rsub", "radd")]
    cases += [(_method(name), ids(8, 6, 12), ids(8, 12)) for name in _INTEGERS.split()]
    return [
        *cases,
        (operator.and_, mask(6, 12), mask(12)),
        (operator.or_, mask(6, 12), mask(12)),
        (operator.xor, mask(6, 12), mask(12)),
        (operator.lshift, ids(8, 6, 12), ids(3, 12)),
        (operator.rshift, ids(8, 6, 12), ids(3, 12)),
        (operator.invert, ids(8, 6, 12)),
        (torch.bitwise_not, ids(8, 6, 12)),
        (operator.mod, x(6, 12), positive(12)),
        (operator.floordiv, const(6, 12), const(12)),
        (torch.floor_divide, const(6, 12), const(12)),
        ("__rfloordiv__", const(6, 12), const(12)),
        ("__rmod__", const(6, 12), const(12)),
        (operator.pos, x(6, 12)),
        (F.threshold, x(6, 12), 0.1, 20.0),
        (F.prelu, x(6, 4, 12), x(1)),
        (F.prelu, x(6, 4, 12), x(4)),
        (F.prelu, x(6, 4, 4), x(4)),
        (torch.clip, x(6, 12), -0.5, 0.5),
        (torch.clip, x(6, 12), x(6, 12), x(12)),
        (torch.clamp_min, x(6, 12), 0.0),
        (torch.clamp_max, x(6, 12), 0.0),
        (torch.ones_like, x(6, 12)),
        (torch.full_like, x(6, 12), 2.0),
        (_ATEN.fill.Scalar, x(6, 12), 2.0),
        (_ATEN._to_copy.default, x(6, 12), {"dtype": torch.float64}),
        *((op.Tensor, x(6, 12), x(12), {"alpha": 2.0}) for op in (_ATEN.add, _ATEN.sub, _ATEN.rsub)),
        *((op.Scalar, x(6, 12), 2.0) for op in (_ATEN.add, _ATEN.sub, _ATEN.rsub, _ATEN.mul, _ATEN.div)),
        *((op.Tensor, x(6, 12), positive(12)) for op in (_ATEN.mul, _ATEN.div)),
        (_ATEN.div.Tensor_mode, const(6, 12), const(12), {"rounding_mode": "floor"}),
        (_ATEN.where.self, mask(6, 12), x(6, 12), x(12)),
        (_ATEN.masked_fill.Scalar, x(6, 12), mask(12), 0.0),
        (_ATEN.masked_fill.Tensor, x(6, 12), mask(12), torch.tensor(2.0).double()),
        (torch.real, x(6, 12)),
        (torch.imag, torch.view_as_complex(const(6, 12, 2)).requires_grad_()),
        (torch.angle, torch.view_as_complex(const(6, 12, 2)).requires_grad_()),
        (torch.complex, x(6, 12), x(12)),
        (torch.polar, positive(6, 12), x(12)),
        ("type", x(6, 12), torch.float64),
        (F.dropout1d, x(6, 4, 12), 0.5, True),
        (F.dropout2d, x(6, 4, 3, 3), 0.5, False),
        (F.dropout3d, x(6, 4, 3, 3, 3), 0.5, False),
    ]


NAMED: dict[str, list[Case]] = {
    "matrix": [
        (torch.dot, x(12), x(12)),
        (torch.linalg.cholesky, torch.eye(4).double().expand(6, 4, 4).clone().requires_grad_()),
    ],
    "elementwise": _elementwise(),
    "reductions": [
        (torch.amin, x(6, 12), 0),
        (torch.amax, tied(12, 5), 0),
        (torch.amax, tied(6, 4, 12), (0, -1), True),
        (torch.amax, tied(6, 12), {"axis": 1, "keepdims": True}),
        (torch.amax, ids(3, 6, 12), 1),
        ("amin", tied(12, 6), {"dim": 0, "keepdim": True}),
        (torch.max, tied(6, 12)),
        ("min", tied(6, 4, 12)),
        (torch.prod, x(6, 12), 1),
        (torch.var_mean, x(6, 12), 0),
        (torch.std_mean, x(6, 12), 1),
        (F.softmin, x(6, 12), 1),
        (torch.cumprod, x(6, 12), 1),
        (torch.logcumsumexp, x(6, 12), 0),
        *[(getattr(torch.fft, kind), x(6, 4, 12)) for kind in _TRANSFORMS.split()],
        (torch.fft.fftshift, x(6, 12)),
        (torch.fft.ifftshift, x(6, 12)),
        (torch.stft, x(6, 48), 12, {"window": _WINDOW, "return_complex": True}),
        ("stft", x(48), 12, 6, {"window": _WINDOW, "return_complex": True}),
        (torch.istft, torch.view_as_complex(const(6, 7, 17, 2)).requires_grad_(), 12, {"window": _WINDOW}),
    ],
    "views": [
        ("diagonal", x(6, 6)),
        ("as_strided", x(6, 8), (3, 4), (8, 1), 5),
        (torch.as_strided_copy, x(6, 8), (3, 4), (8, 1), 5),
        (torch.diagonal, x(4, 6, 12, 6), 1, {"dim1": 1, "dim2": -1}),
        (_ATEN.slice_backward.default, x(6, 4, 12), [6, 10, 12], 1, 2, 10, 2),
        (_ATEN.slice_backward.default, x(6, 12), [6, 12], -1, 0, 12, 1),
        (_ATEN.select_backward.default, x(6, 12), [6, 5, 12], 1, 3),
        (torch.swapaxes, x(6, 4, 12), 0, 2),
        (torch.swapdims, x(6, 4, 12), 0, 1),
        (torch.moveaxis, x(6, 4, 12), 0, 2),
        (torch.broadcast_to, x(6, 1), (6, 12)),
        (torch.triu, x(6, 4, 4)),
        ("new_ones", x(6, 12), (3, 4)),
        ("new_full", x(6, 12), (3, 4), 2.0),
    ],
    "pieces": [
        (torch.split_with_sizes, x(6, 24), [12, 6, 6], -1),
        (torch.tensor_split, x(6, 24), 2, 1),
        (torch.concat, [x(6, 4), x(6, 12)], 1),
        (torch.concatenate, [x(6, 4), x(6, 4)], 0),
        (torch.take_along_dim, x(6, 12), ids(12, 6, 4), 1),
        (torch.take_along_dim, x(6, 12, 4), ids(12, 1, 3, 4), -2),
        (torch.take_along_dim, x(1, 12), ids(12, 6, 4), {"dim": 1}),
    ],
    "layers": [
        (
            _ATEN.native_layer_norm_backward.default,
            *(x(4, 6, 12), x(4, 6, 12), [12], const(4, 6, 1), positive(4, 6, 1).detach(), const(12), const(12)),
            [True, False, False],
        ),
        (F.instance_norm, x(6, 4, 5), None, None, x(4), x(4)),
        (torch.batch_norm, x(6, 4, 3, 3), x(4), x(4), const(4), const(4).exp(), True, 0.2, 1e-5, False),
        (F.embedding_bag, ids(12, 6, 4), x(12, 6)),
        (F.embedding_bag, ids(12, 6, 4), x(12, 6), {"mode": "sum", "per_sample_weights": x(6, 4)}),
        (F.embedding_bag, ids(12, 6, 4), x(12, 6), {"mode": "sum", "scale_grad_by_freq": True}),
        (F.embedding_bag, ids(12, 8), x(12, 6), torch.tensor([0, 5]), {"mode": "sum"}),
        (F.instance_norm, x(6, 4, 5), const(4), positive(4).detach(), x(4), x(4), True, 0.3),
        (F.instance_norm, x(6, 4, 5), const(4), positive(4).detach(), {"use_input_stats": False}),
        (torch.instance_norm, x(5, 4, 3), None, None, const(4), positive(4).detach(), True, 0.3, 1e-5, True),
        (torch.conv_transpose1d, x(6, 4, 5), x(4, 6, 3)),
        (torch.conv_transpose3d, x(2, 4, 3, 3, 3), x(4, 6, 2, 2, 2)),
        (F.max_pool1d, x(6, 4, 6), 2),
        (F.max_pool3d, x(2, 4, 4, 4, 4), 2),
        (F.avg_pool1d, x(6, 4, 6), 2),
        (F.adaptive_avg_pool1d, x(6, 4, 6), 2),
        (F.avg_pool3d, x(2, 4, 4, 4, 4), 2),
        (F.adaptive_avg_pool3d, x(2, 4, 4, 4, 4), 2),
        (F.adaptive_max_pool1d, x(6, 4, 6), 2),
        (F.adaptive_max_pool2d, x(6, 4, 6, 6), 2),
        (F.affine_grid, x(6, 2, 3), (6, 4, 3, 5), False),
        (F.affine_grid, x(6, 3, 4), {"size": (6, 1, 2, 3, 5), "align_corners": True}),
        (torch._VF.rnn_relu, x(3, 6, 4), x(1, 6, 2), weights(2, 4, 2), True, 1, 0.0, True, False, False),
    ],
    "losses": [
        (F.smooth_l1_loss, x(6, 12), x(6, 12)),
        *_margins(),
        (F.huber_loss, x(6, 12), x(6, 12), {"reduction": "sum"}),
        (
            F.binary_cross_entropy,
            torch.rand(6, 12, dtype=torch.float64, generator=DRAWS),
            torch.rand(6, 12, dtype=torch.float64, generator=DRAWS),
        ),
    ],
}
