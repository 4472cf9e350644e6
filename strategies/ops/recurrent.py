"""Recurrent layers: the batch can be split; time and features stay whole."""

from __future__ import annotations

from torch import fx

from autopar.strategies.arguments import Writer, argument, output_shapes, tensors, value


def recurrent(states: int) -> Writer:
    """`lstm` (two states), `gru`, `rnn_tanh`, `rnn_relu` (one), as `torch.nn` calls them.

    `(input, states, weights, has_biases, layers, dropout, training, bidirectional, batch_first)`; packed sequences have
    another signature and no rule. With dropout between layers, local code runs the layers one by one, because the fused
    kernel would draw its own mask.
    """

    def write(node: fx.Node) -> str | None:
        inputs = tensors(node)
        is_packed = not isinstance(value(node.args[2]), (tuple, list))
        if is_packed or inputs[0].dim() != 3:
            return None
        batched = "b _ _" if argument(node, "batch_first", 8, False) else "_ b _"
        operands = [batched, *["_ b _"] * states, *(" ".join("_" * w.dim()) for w in inputs[1 + states :])]
        outputs = [batched, *["_ b _"] * (len(output_shapes(node)) - 1)]
        layers, dropout = argument(node, "num_layers", 4, 1), argument(node, "dropout", 5, 0.0)
        drops = argument(node, "train", 6, False) and dropout > 0 and layers > 1
        return f"{', '.join(operands)} -> {', '.join(outputs)}{' | @recurrent_dropout always' if drops else ''}"

    return write


RULES: dict[str, str | Writer] = {"lstm": recurrent(2), "gru rnn_tanh rnn_relu": recurrent(1)}
