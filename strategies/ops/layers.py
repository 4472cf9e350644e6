"""Norms, embeddings, convolutions and pooling."""

from __future__ import annotations

import torch.nn.functional as F
from torch import fx

from autopar.strategies.arguments import Writer, argument, by_name, integers, letters, output_shapes, tensors


def over_last_dims(signature: str) -> Writer:
    """A norm over the last dims, as many as `normalized_shape` has."""

    def write(node: fx.Node) -> str | None:
        shape = integers(node, "normalized_shape", 1)
        dims = " ".join(f"d{k}!" for k in range(len(shape or ())))
        return by_name(signature, f"... {dims}", input=f"... {dims}", weight=dims, bias=dims)(node)

    return write


def layer_norm_backward(node: fx.Node) -> str | None:
    """The gradient of the input alone, as derivatives by inputs have it; linear in that of the output."""
    if list(argument(node, "output_mask", 7)) != [True, False, False]:
        return None
    inside = range(len(argument(node, "normalized_shape", 2)))
    dims, ones = " ".join(f"d{k}!" for k in inside), " ".join("1" for _ in inside)
    of_input = f"... {dims}"
    given = {"grad_out": of_input, "input": of_input, "mean": f"... {ones}", "rstd": f"... {ones}"}
    signature = "grad_out input normalized_shape mean rstd weight bias output_mask"
    return by_name(signature, f"{of_input} | linear:0", **given, weight=dims, bias=dims)(node)


def batch_norm(node: fx.Node) -> str | None:
    """In training the statistics are those of the whole batch; in eval each element stands alone.

    The running statistics are written in training, and stay whole for it: channels split only where there are none.
    The spatial dims stay whole as for the convolutions around.
    """
    training, place = argument(node, "training", 5, False), _place(node, F.batch_norm)
    channel = "c!" if training and argument(node, "running_mean", place) is not None else "c"
    dims = f"b {channel} ...!"
    notes = " | b @batch_norm" if training else ""
    kept, given = ("running_mean running_var", "weight bias")[:: 1 if place == 1 else -1]
    signature = f"input {kept} {given} training momentum eps"
    channels = dict.fromkeys(("running_mean", "running_var", "weight", "bias"), channel)
    return by_name(signature, dims + notes, input=dims, **channels)(node)


def _place(node: fx.Node, function: object) -> int:
    """Where a norm has its running statistics: torch's own, other than its functional ones, behind weight and bias."""
    return 1 if node.target is function else 3


def instance_norm(node: fx.Node) -> str:
    """Each channel of each sample by itself.

    Running statistics are written in training, as the mean over the whole batch, and stay whole for it as those of
    `batch_norm`.
    """
    place = _place(node, F.instance_norm)
    written = argument(node, "use_input_stats", 5, True) and argument(node, "running_mean", place) is not None
    channel = "c!" if written else "c"
    dims, notes = f"b {channel} ...!", " | b @instance_norm" if written else ""
    return f"{dims}{f', [{channel}]?' * 4} -> {dims}{notes}"


def group_norm(node: fx.Node) -> str | None:
    """Each sample by itself."""
    signature = "input num_groups weight bias eps"
    return by_name(signature, "b c! ...!", input="b c! ...!", weight="c!", bias="c!")(node)


def embedding(node: fx.Node) -> str | None:
    """Rows of a table; on the vocabulary a masked lookup whose results are summed."""
    if argument(node, "sparse", 6, False):
        return None
    special = argument(node, "max_norm", 3) is not None or argument(node, "scale_grad_by_freq", 5, False)
    signature = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    if special:
        return by_name(signature, "...! d", input="...!", weight="v! d")(node)
    return by_name(signature, "... d | v @embedding_vocab plain ragged idle", input="...", weight="v d")(node)


def embedding_bag(node: fx.Node) -> str | None:
    """Bags of rows of a table. Where offsets say which ids are a bag, ids and bags stay whole: a part of them would
    need other offsets."""
    if argument(node, "sparse", 7, False):
        return None
    signature = "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights"
    bags = "b!" if argument(node, "scale_grad_by_freq", 5, False) else "b"
    if argument(node, "offsets", 2) is not None:
        return by_name(signature, "_ d", input="n!", weight="v! d", offsets="o!", per_sample_weights="n!")(node)
    ids = f"{bags} l!"
    return by_name(signature, f"{bags} d", input=ids, weight="v! d", per_sample_weights=ids)(node)


def convolution(spatial: int, *, transposed: bool = False) -> Writer:
    """Batch, output and input channels split (input channels leave a partial sum), groups where there are several.

    The spatial dims stay whole. Transposed: the weight is (in, out / groups, ...), and `groups` stands behind
    `output_padding`.
    """

    def write(node: fx.Node) -> str | None:
        unbatched = tensors(node)[0].dim() == spatial + 1
        groups = argument(node, "groups", 6, 1)
        batch = [] if unbatched else ["b"]
        blank = ["_"] * spatial
        bias = len(tensors(node)) > 2  # not split off: a partial sum would get it once a rank
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
    """Groups split with their channels; within a group nothing does (its channels would mix with another's)."""
    for name in ("i", "o"):
        text = text.replace(f"={groups} {name})", f"={groups} {name}!)").replace(f" {name} ", f" {name}! ")
    return f"{text} | g @groups"


def interpolate(node: fx.Node) -> str:
    """The spatial dims, which stay whole, change their lengths; every mode weighs its neighbours by place alone."""
    blank = " ".join("_" * (tensors(node)[0].dim() - 2))
    return f"b c {blank} -> b c {blank} | linear"


def grid_sample(node: fx.Node) -> str:
    """Samples and channels split, and the places that are asked for."""
    blank = " ".join("_" * (tensors(node)[0].dim() - 2))
    places = " ".join(letters(tensors(node)[0].dim() - 2))
    places = " ".join(f"p{name}" for name in places.split())
    return f"n c {blank}, n {places} _ -> n c {places} | linear:0"


def affine_grid(node: fx.Node) -> str:
    """A grid for each sample; its size is told with the number of samples."""
    return f"n _ _ -> n {' '.join('_' * (len(output_shapes(node)[0]) - 1))} | linear, n @shape"


def pooling(spatial: int, *, notes: str = "") -> Writer:
    """Windows over the last dims, which stay whole; with indices there are two outputs."""

    def write(node: fx.Node) -> str:
        blank = " ".join("_" * spatial)
        outputs = ", ".join([f"... {blank}"] * (2 if isinstance(node.meta["val"], (tuple, list)) else 1))
        return f"... {blank} -> {outputs}{' | ' + notes if notes else ''}"

    return write


def weight_norm(node: fx.Node) -> str | None:
    """Directions and lengths of weights along one dim: each is made of what is at its place of that dim."""
    rank, dim = len(output_shapes(node)[0]), argument(node, "dim", 2, 0)
    if not 0 <= dim < rank:  # -1: one length for all
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
