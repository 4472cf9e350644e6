"""Norms, embeddings, convolutions and pooling."""

from __future__ import annotations

import torch.nn.functional as F
from torch import fx

from autopar.strategies.arguments import Writer, argument, by_name, integers, letters, output_shapes, tensors


def over_last_dims(signature: str) -> Writer:
    """A writer for a norm over as many last dims as `normalized_shape` has; these stay whole."""

    def write(node: fx.Node) -> str | None:
        shape = integers(node, "normalized_shape", 1)
        dims = " ".join(f"d{k}!" for k in range(len(shape or ())))
        return by_name(signature, f"... {dims}", input=f"... {dims}", weight=dims, bias=dims)(node)

    return write


def layer_norm_backward(node: fx.Node) -> str | None:
    """If only the gradient of the input is computed (derivatives with respect to inputs): linear in the output's
    gradient."""
    if list(argument(node, "output_mask", 7)) != [True, False, False]:
        return None
    inside = range(len(argument(node, "normalized_shape", 2)))
    dims, ones = " ".join(f"d{k}!" for k in inside), " ".join("1" for _ in inside)
    of_input = f"... {dims}"
    operands = {"grad_out": of_input, "input": of_input, "mean": f"... {ones}", "rstd": f"... {ones}"}
    signature = "grad_out input normalized_shape mean rstd weight bias output_mask"
    return by_name(signature, f"{of_input} | linear:0", **operands, weight=dims, bias=dims)(node)


def batch_norm(node: fx.Node) -> str | None:
    """In training the statistics are those of the whole batch; in eval the op is elementwise.

    Training writes the running statistics, which have to stay whole for this: channels can be split only without them.
    The spatial dims stay whole, as in the convolutions around the norm.
    """
    training, place = argument(node, "training", 5, False), _place(node, F.batch_norm)
    channel = "c!" if training and argument(node, "running_mean", place) is not None else "c"
    dims = f"b {channel} ...!"
    notes = " | b @batch_norm" if training else ""
    statistics, affine = ("running_mean running_var", "weight bias")[:: 1 if place == 1 else -1]
    signature = f"input {statistics} {affine} training momentum eps"
    channels = dict.fromkeys(("running_mean", "running_var", "weight", "bias"), channel)
    return by_name(signature, dims + notes, input=dims, **channels)(node)


def _place(node: fx.Node, function: object) -> int:
    """The position of a norm's running statistics: 1 in `torch.nn.functional`, 3 (after weight and bias) in `torch`."""
    return 1 if node.target is function else 3


def instance_norm(node: fx.Node) -> str:
    """Normalises each channel of each sample by itself.

    Training writes running statistics as the mean over the whole batch; they stay whole, as those of `batch_norm`.
    """
    place = _place(node, F.instance_norm)
    written = argument(node, "use_input_stats", 5, True) and argument(node, "running_mean", place) is not None
    channel = "c!" if written else "c"
    dims, notes = f"b {channel} ...!", " | b @instance_norm" if written else ""
    return f"{dims}{f', [{channel}]?' * 4} -> {dims}{notes}"


def group_norm(node: fx.Node) -> str | None:
    """Normalises each sample by itself; channels stay whole."""
    signature = "input num_groups weight bias eps"
    return by_name(signature, "b c! ...!", input="b c! ...!", weight="c!", bias="c!")(node)


def embedding(node: fx.Node) -> str | None:
    """Looks up rows of a table. Split on the vocabulary, it is a masked lookup whose results are summed over ranks."""
    if argument(node, "sparse", 6, False):
        return None
    special = argument(node, "max_norm", 3) is not None or argument(node, "scale_grad_by_freq", 5, False)
    signature = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    if special:
        return by_name(signature, "...! d", input="...!", weight="v! d")(node)
    return by_name(signature, "... d | v @embedding_vocab plain ragged idle", input="...", weight="v d")(node)


def embedding_bag(node: fx.Node) -> str | None:
    """Reduces bags of rows of a table. If offsets say where bags begin, ids and bags stay whole, because a part of them
    would need other offsets."""
    if argument(node, "sparse", 7, False):
        return None
    signature = "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights"
    bags = "b!" if argument(node, "scale_grad_by_freq", 5, False) else "b"
    if argument(node, "offsets", 2) is not None:
        return by_name(signature, "_ d", input="n!", weight="v! d", offsets="o!", per_sample_weights="n!")(node)
    ids = f"{bags} l!"
    return by_name(signature, f"{bags} d", input=ids, weight="v! d", per_sample_weights=ids)(node)


def convolution(spatial: int, *, transposed: bool = False) -> Writer:
    """A convolution over `spatial` dims: batch, output and input channels can be split (input channels leave a partial
    sum); with several groups, the groups instead of channels. The spatial dims stay whole.

    The weight of a transposed one is (in, out / groups, ...), and its argument `groups` follows `output_padding`.
    """

    def write(node: fx.Node) -> str | None:
        unbatched = tensors(node)[0].dim() == spatial + 1
        groups = argument(node, "groups", 6, 1)
        batch = [] if unbatched else ["b"]
        blank = ["_"] * spatial
        bias = len(tensors(node)) > 2  # still in the op: every rank would add it to its partial sum
        inside, outside = ("i!" if bias else "i", "o") if groups == 1 else (f"(g={groups} i)", f"(g={groups} o)")
        if groups == 1:
            weight = [inside, "o"] if transposed else ["o", inside]
        else:
            weight = [inside, "o"] if transposed else [outside, "i"]
        text = f"{' '.join([*batch, inside, *blank])}, {' '.join([*weight, *blank])}"
        text += f"{', ' + outside if bias else ''} -> {' '.join([*batch, outside, *blank])}"
        return text if groups == 1 else _grouped(text, groups)

    return write


def _grouped(text: str, groups: int) -> str:
    """Splits groups with their channels, but not the channels within a group (a part would mix with other groups)."""
    for name in ("i", "o"):
        text = text.replace(f"={groups} {name})", f"={groups} {name}!)").replace(f" {name} ", f" {name}! ")
    return f"{text} | g @groups"


def interpolate(node: fx.Node) -> str:
    """Changes the lengths of the spatial dims, which stay whole. Linear, since all modes weigh by position alone."""
    blank = " ".join("_" * (tensors(node)[0].dim() - 2))
    return f"b c {blank} -> b c {blank} | linear"


def grid_sample(node: fx.Node) -> str:
    """Samples, channels and the dims of the sampled grid can be split."""
    blank = " ".join("_" * (tensors(node)[0].dim() - 2))
    places = " ".join(letters(tensors(node)[0].dim() - 2))
    places = " ".join(f"p{name}" for name in places.split())
    return f"n c {blank}, n {places} _ -> n c {places} | linear:0"


def affine_grid(node: fx.Node) -> str:
    """One grid for each sample; the size argument includes the number of samples."""
    return f"n _ _ -> n {' '.join('_' * (len(output_shapes(node)[0]) - 1))} | linear, n @shape"


def pooling(spatial: int, *, notes: str = "") -> Writer:
    """Pooling over the last `spatial` dims, which stay whole; with indices there are two outputs."""

    def write(node: fx.Node) -> str:
        blank = " ".join("_" * spatial)
        outputs = ", ".join([f"... {blank}"] * (2 if isinstance(node.meta["val"], (tuple, list)) else 1))
        return f"... {blank} -> {outputs}{' | ' + notes if notes else ''}"

    return write


def weight_norm(node: fx.Node) -> str | None:
    """Weights from directions and lengths: each slice along `dim` is normalised by itself, so that `dim` can be
    split."""
    rank, dim = len(output_shapes(node)[0]), argument(node, "dim", 2, 0)
    if not 0 <= dim < rank:  # -1: one length for the whole tensor
        return None
    direction, length = (" ".join("a" if k == dim else other for k in range(rank)) for other in ("_", "1"))
    return f"{direction}, {length} -> {direction} | linear:1"


RULES: dict[str, str | Writer] = {
    "layer_norm": over_last_dims("input normalized_shape weight bias eps"),
    "rms_norm": over_last_dims("input normalized_shape weight eps"),
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "weight_norm": weight_norm,
    "instance_norm": instance_norm,
    "embedding": embedding,
    "embedding_bag": embedding_bag,
    "conv1d": convolution(1),
    "conv2d": convolution(2),
    "conv3d": convolution(3),
    "conv_transpose1d": convolution(1, transposed=True),
    "conv_transpose2d": convolution(2, transposed=True),
    "conv_transpose3d": convolution(3, transposed=True),
    "max_pool1d": pooling(1),
    "max_pool2d": pooling(2),
    "max_pool3d": pooling(3),
    "avg_pool1d adaptive_avg_pool1d": pooling(1, notes="linear"),
    "avg_pool2d adaptive_avg_pool2d": pooling(2, notes="linear"),
    "avg_pool3d adaptive_avg_pool3d": pooling(3, notes="linear"),
    "adaptive_max_pool1d": pooling(1),
    "adaptive_max_pool2d": pooling(2),
    "interpolate upsample": interpolate,
    "grid_sample": grid_sample,
    "affine_grid": affine_grid,
}

OPERATORS: dict[str, str | Writer] = {"native_layer_norm_backward": layer_norm_backward}
