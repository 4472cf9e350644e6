"""Recurrent layers: sequences side by side split, time and features stay whole."""

from __future__ import annotations

from torch import fx

from autopar.strategies.arguments import Writer, argument, output_shapes, tensors, value


def recurrent(states: int) -> Writer:
    """`lstm` (two states), `gru`, `rnn_tanh`, `rnn_relu` (one), as `torch.nn` calls them.

    `(input, states, weights, has_biases, layers, dropout, training, bidirectional, batch_first)`. With dropout between
    layers the kernel draws its own mask, which no rank could share; packed sequences have another signature.
    """

    def write(node: fx.Node) -> str | None:
        given = tensors(node)[0]
        is_packed = not isinstance(value(node.args[2]), (tuple, list))
        if (
            is_packed
            or (argument(node, "dropout", 5, 0.0) > 0 and argument(node, "train", 6, False))
            or given.dim() != 3
        ):
            return None
        batched = "b _ _" if argument(node, "batch_first", 8, False) else "_ b _"
        rest = tensors(node)[1 + states :]
        operands = [batched, *["_ b _"] * states, *(" ".join("_" * w.dim()) for w in rest)]
        return f"{', '.join(operands)} -> {', '.join([batched, *['_ b _'] * (len(output_shapes(node)) - 1)])}"

    return write


RULES: dict[str, str | Writer] = {"lstm": recurrent(2), "gru rnn_tanh rnn_relu": recurrent(1)}
