"""A folder of transformers is turned into a model on the meta device, or an error names what the folder lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from autopar import InputError
from autopar.pretrained import on_meta


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=32, architectures=["GPT2LMHeadModel"], dtype="bfloat16"
    )
    config.save_pretrained(tmp_path)
    return tmp_path


def test_the_model_is_the_one_that_the_config_names(folder: Path) -> None:
    model = on_meta(folder)
    assert type(model) is transformers.GPT2LMHeadModel
    assert model.training
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert torch.get_default_dtype() == torch.float32
    assert type(on_meta(folder, "GPT2ForSequenceClassification")) is transformers.GPT2ForSequenceClassification
    assert type(on_meta(folder, transformers.GPT2Model)) is transformers.GPT2Model


def test_what_the_folder_lacks_is_told(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(InputError, match=r"holds no config\.json"):
        on_meta(tmp_path_factory.mktemp("empty"))
    with pytest.raises(InputError, match="no architecture 'GPT2LMHedModel': did you mean GPT2LMHeadModel"):
        on_meta(folder, "GPT2LMHedModel")
    file = folder / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "architectures": None}))
    with pytest.raises(InputError, match="names no architecture: pass one"):
        on_meta(folder)
    file.write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(InputError, match="cannot be read"):
        on_meta(folder)
    file.write_text("no JSON")
    with pytest.raises(InputError, match="cannot be read"):
        on_meta(folder)
