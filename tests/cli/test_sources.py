"""Example inputs made from a Hugging Face config, by kind of model: the model accepts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from autopar.errors import InputError
from autopar.sources import example_inputs, load_source

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
_T5 = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
_WHISPER = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}


def _model(name: str, values: dict[str, Any]) -> Any:
    architecture = getattr(transformers, name)
    return architecture(architecture.config_class.from_dict(values))


@pytest.mark.parametrize(
    ("name", "values", "inputs"),
    [
        ("LlamaForCausalLM", _SMALL, {"input_ids": (2, 16), "labels": (2, 16)}),
        ("BertForMaskedLM", _SMALL, {"input_ids": (2, 16), "labels": (2, 16)}),
        ("BertForSequenceClassification", _SMALL, {"input_ids": (2, 16), "labels": (2,)}),
        ("BertForNextSentencePrediction", _SMALL, {"input_ids": (2, 16), "labels": (2,)}),
        (
            "BertForQuestionAnswering",
            _SMALL,
            {"input_ids": (2, 16), "start_positions": (2,), "end_positions": (2,)},
        ),
        ("ViTForImageClassification", _SMALL, {"pixel_values": (2, 3, 32, 32), "labels": (2,)}),
        ("T5ForConditionalGeneration", _T5, {"input_ids": (2, 16), "labels": (2, 16)}),
        ("WhisperForConditionalGeneration", _WHISPER, {"input_features": (2, 80, 3000), "labels": (2, 16)}),
    ],
)
def test_the_model_takes_its_examples(name: str, values: dict[str, Any], inputs: dict[str, tuple[int, ...]]) -> None:
    model = _model(name, values)
    examples = example_inputs(model, batch=2, sequence=16)
    assert {key: tuple(tensor.shape) for key, tensor in examples.items()} == inputs
    loss = model(**{key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in examples.items()}).loss
    assert loss.shape == ()


def test_learned_positions_bound_the_sequence() -> None:
    model = _model("BertForMaskedLM", {**_SMALL, "max_position_embeddings": 24})
    with pytest.raises(InputError, match="longer than the 24 learned positions"):
        example_inputs(model, batch=1, sequence=25)
    assert example_inputs(model, batch=1)["input_ids"].shape == (1, 24)
    speech = _model("WhisperForConditionalGeneration", {**_WHISPER, "max_target_positions": 24})
    assert example_inputs(speech, batch=1)["labels"].shape == (1, 24)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("broken_builders:number", "'number' of module 'broken_builders' is no function: it is of type int"),
        ("broken_builders:needs", r"takes width, and is called without arguments: give defaults.*broken_builders.py:2"),
        ("broken_builders:neds", "has no function 'neds': did you mean needs"),
        ("hf:Nope", "has no architecture 'Nope': .*hf:GPT2LMHeadModel"),
    ],
)
def test_what_is_wrong_with_a_source_is_told(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_builders.py").write_text("number = 3\ndef needs(width):\n    return width\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=words):
        load_source(text, batch=2)
