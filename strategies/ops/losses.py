"""Losses: batches and classes can be split; a mean divides by the global count."""

from __future__ import annotations

from torch import fx

from autopar.strategies.arguments import Writer, argument, tensors


def _reduction(node: fx.Node) -> str | None:
    """The `reduction` of a cross entropy; None if it is given by torch's deprecated arguments."""
    if argument(node, "size_average", 3) is not None or argument(node, "reduce", 5) is not None:
        return None
    return str(argument(node, "reduction", 6, "mean"))


def cross_entropy(node: fx.Node) -> str | None:
    """`cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)`."""
    logits, target, *weight = tensors(node)
    reduction = _reduction(node)
    if reduction is None:
        return None
    rows = [f"x{k}" for k in range(logits.dim() - 1)]
    classes = [*rows[:1], "v", *rows[1:]]
    operands = [classes, classes if target.is_floating_point() else rows] + [["v"]] * len(weight)
    notes = ["v @cross_entropy whole plain ragged"]
    if reduction == "mean":
        notes += [f"{n} @cross_entropy" for n in rows]
    output = " ".join(rows) if reduction == "none" else ""
    return f"{', '.join(map(' '.join, operands))} -> {output} | {', '.join(notes)}"


def elementwise_loss(position: int) -> Writer:
    """A loss of each element, then a reduction. `position`: the place of `reduction` among the arguments."""

    def write(node: fx.Node) -> str | None:
        if any(argument(node, name, 99) is not None for name in ("size_average", "reduce")):
            return None
        reduction = argument(node, "reduction", position, "mean")
        operands = ", ".join(["..."] * len(tensors(node)))
        if reduction == "none":
            return f"{operands} -> ..."
        return f"{operands} -> {' | ... @mean' if reduction == 'mean' else ''}"

    return write


def row_loss(position: int, text: str, weighted: str = "") -> Writer:
    """A loss of each row, then a reduction, whose argument is at `position`. `text`: the inputs' dims, with rows `n`.

    `weighted`: a note on linearity in the last input, a weight, used if that is given and the reduction is no mean.
    """

    def write(node: fx.Node) -> str | None:
        operands = text.split(", ")
        operand_tensors = tensors(node)
        if [t.dim() for t in operand_tensors] != [len(dims.split()) for dims in operands[: len(operand_tensors)]]:
            return None
        if any(argument(node, name, 99) is not None for name in ("size_average", "reduce")):
            return None
        reduction = argument(node, "reduction", position, "mean")
        linear = f"| {weighted}" if weighted and len(operand_tensors) == len(operands) else ""
        output = {"none": f"n {linear}", "sum": linear, "mean": "| n @mean"}[reduction]
        return f"{', '.join(operands[: len(operand_tensors)])} -> {output}"

    return write


def nll(node: fx.Node) -> str | None:
    """`nll_loss(input, target, weight, size_average, ignore_index, reduce, reduction)`.

    If classes are split, each rank picks the labels that are among its classes, so that the loss is a sum over ranks.
    """
    logits, _, *weight = tensors(node)
    reduction = _reduction(node)
    if reduction is None:
        return None
    rows = [f"x{k}" for k in range(logits.dim() - 1)]
    operands = [[*rows[:1], "v", *rows[1:]], rows] + [["v"]] * len(weight)
    notes = ["linear:0", "v @cross_entropy plain ragged"]
    if reduction == "mean":
        notes += [f"{n} @cross_entropy" for n in rows]
    output = " ".join(rows) if reduction == "none" else ""
    return f"{', '.join(map(' '.join, operands))} -> {output} | {', '.join(notes)}"


def divergence(node: fx.Node) -> str | None:
    """`kl_div(input, target, size_average, reduce, reduction, log_target)`; "batchmean" divides by the number of
    rows."""
    if argument(node, "size_average", 2) is not None or argument(node, "reduce", 3) is not None:
        return None
    reduction = argument(node, "reduction", 4, "mean")
    if reduction == "batchmean":
        return "b ...!, b ...! -> | b @mean"
    return {"none": "..., ... -> ...", "sum": "..., ... -> ", "mean": "..., ... -> | ... @mean"}[reduction]


def ctc(node: fx.Node) -> str | None:
    """`ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction)`, split on the batch.

    Concatenated targets, and lengths that are not tensors, cannot be split.
    """
    shapes = [t.dim() for t in tensors(node)]
    reduction = argument(node, "reduction", 5, "mean")
    if shapes != [3, 2, 1, 1]:
        return None
    return f"_ n _, n _, n, n -> {'n' if reduction == 'none' else '| n @mean' if reduction == 'mean' else ''}"


RULES: dict[str, str | Writer] = {
    "cross_entropy": cross_entropy,
    "nll_loss": nll,
    "kl_div": divergence,
    "ctc_loss": ctc,
    "cosine_embedding_loss": row_loss(6, "n d!, n d!, n"),
    "triplet_margin_loss": row_loss(9, "n d!, n d!, n d!"),
    "multi_margin_loss": row_loss(7, "n c!, n, c!", "linear:2"),
    "multilabel_margin_loss": row_loss(4, "n c!, n c!"),
    "multilabel_soft_margin_loss": row_loss(5, "n c!, n c!, c!"),
    "soft_margin_loss": elementwise_loss(4),
    "hinge_embedding_loss": elementwise_loss(5),
    "margin_ranking_loss": elementwise_loss(6),
    "mse_loss l1_loss": elementwise_loss(4),
    "smooth_l1_loss huber_loss": elementwise_loss(4),
    "poisson_nll_loss": elementwise_loss(7),
    "binary_cross_entropy binary_cross_entropy_with_logits": elementwise_loss(5),
}
