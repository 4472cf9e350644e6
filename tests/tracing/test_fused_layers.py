"""`nn.TransformerEncoder` with its default arguments and padding, in `eval()`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.tracing import trace


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0)
        return hidden


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_in_inference() -> None:
    torch.manual_seed(0)
    model, ids = Encoder().eval(), torch.randint(1, 20, (8, 7))
    ids[:4, 5:] = 0
    expected = model(ids)  # torch uses no fused kernel if gradients are needed
    traced = trace(model, {"ids": ids}).gm(ids)
    assert torch.equal(traced, expected)
    with torch.no_grad():
        graph = trace(model, {"ids": ids})
        assert torch.allclose(graph.gm(ids)[ids != 0], model(ids)[ids != 0], atol=1e-6)
    assert not [node for node in graph.graph.nodes if "nested" in str(node.target) or "_fwd" in str(node.target)]
    assert torch.backends.mha.get_fastpath_enabled()
