"""Weights are read from files into shards on real ranks, and written to files that others read: see `weight_cases`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch, needed, values
from thinned import thinned
from weight_cases import BUILDS, CASES, PRESETS, REFUSED

from autopar import export_full_state
from autopar.errors import InputError


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    grid = [case for case in CASES[2] if case.startswith("read-")]
    return launch("weight_cases.py", 2, cases=needed(request, CASES[2], "of", "name", "preset", of=grid))


@pytest.mark.parametrize(("of", "name", "preset"), thinned(3, ["read"], list(BUILDS), PRESETS))
def test_each_rank_reads_its_part(of: str, name: str, preset: str, two: list[dict[str, Any]]) -> None:
    for found in values(two, f"{of}-{name}-{preset}"):
        assert found["differing"] == found["waiting"] == []
        assert found["loss_error"] < 1e-6
        assert (found["files"] > 1) == (name in ("llama", "t5"))
        # norms and biases are replicated
        assert 0.9 < found["share"] <= 1 if preset == "ddp" else found["share"] < 0.56


@pytest.mark.parametrize("preset", PRESETS)
def test_values_are_replaced_in_place(preset: str, two: list[dict[str, Any]]) -> None:
    assert values(two, f"read_again-{preset}") == [[], []]


@pytest.mark.parametrize("preset", PRESETS)
def test_from_pretrained_is_that_of_transformers(preset: str, two: list[dict[str, Any]]) -> None:
    for found in values(two, f"pretrained-{preset}"):
        assert found["differing"] == []
        assert found["loss_error"] < 1e-6
        assert found["kinds"] == ["LlamaForCausalLM", True, "GenerationConfig"]


def test_from_pretrained_of_a_base_model(two: list[dict[str, Any]]) -> None:
    for found in values(two, "pretrained_without_a_head"):
        assert found["differing"] == []
        assert found["dtypes"] == ["torch.bfloat16"]
        assert found["strict"].startswith("InputError: the files do not hold 'score.")
        assert len(found["told"]) == 1
        assert found["head"]


@pytest.mark.parametrize("name", BUILDS)
def test_what_is_written_is_read_by_others(name: str, two: list[dict[str, Any]]) -> None:
    for found in values(two, f"exported-{name}"):
        assert found["differing"] == []
        assert found["alike"]
        assert found["larger_than_asked"] == []
        weights = [file for file in found["one"] if "safetensors" in file]
        assert weights == ["model.safetensors"]  # files of the previous export are removed
        if name in ("llama", "t5"):
            assert "model.safetensors.index.json" in found["several"]
            assert {"config.json", "generation_config.json"} <= set(found["one"])
            count = sum("-of-" in file for file in found["several"])
            assert count > 2
            assert f"model-00001-of-{count:05d}.safetensors" in found["several"]
        assert not any(file.endswith(".partial") for file in (*found["one"], *found["several"]))


@pytest.mark.parametrize("preset", ["fsdp", "tp"])
def test_experts_are_put_together(preset: str, two: list[dict[str, Any]]) -> None:
    for found in values(two, f"experts-{preset}"):
        assert found["one_by_one"] == 2 * 12 * 3
        assert found["differing"] == []
        assert found["loss_error"] < 1e-6


def test_written_in_another_dtype(two: list[dict[str, Any]]) -> None:
    assert values(two, "exported_in_another_dtype") == [{"dtype": "torch.bfloat16", "differing": []}] * 2


def test_pieces_lie_where_dtensor_puts_them() -> None:
    assert [values([rank], "pieces") for rank in launch("piece_cases.py", 4)] == [[[]]] * 4


WORDS = {
    "missing": "the files do not hold 'model.norm.weight'",
    "unexpected": "the model has no 'more', which the files hold",
    "shape": r"'model.norm.weight' is of shape \(31,\) in model.safetensors, .* of \(32,\)",
    "numbers": "'model.norm.weight' holds I32 numbers .* torch.float32",
    "tied": "the model ties 'model.embed_tokens.weight', 'lm_head.weight', and the files hold other values",
    "damaged": "model.safetensors cannot be read as safetensors",
    "index_of_nothing": "index.json names 'model-9.safetensors', which .* does not hold",
    "wrong_index": "the index says that 'other' is in model.safetensors, where it is not",
    "nothing": "holds no file of weights",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_told_on_every_rank(kind: str, two: list[dict[str, Any]]) -> None:
    for text in values(two, f"refused-{kind}"):
        assert text.startswith("InputError")
        assert re.search(WORDS[kind], text), text


def test_what_fails_on_one_rank_is_told_on_every_rank(two: list[dict[str, Any]]) -> None:
    told = {
        "one_rank_sees_no_folder": "no file or folder",
        "one_rank_sees_no_pretrained": "holds no config.json",
        "cannot_be_written": "cannot write to",
    }
    for case, words in told.items():
        texts = values(two, case)
        assert all(words in text for text in texts)
        # on the failing rank; the other one reports that rank's error
        assert sum(text.startswith("InputError") for text in texts) == 1


def test_numbers_that_safetensors_has_no_dtype_for_are_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2, dtype=torch.complex128)
    with pytest.raises(InputError, match=r"'weight' has the dtype torch.complex128, .* save_checkpoint"):
        export_full_state(model, tmp_path)


def test_not_strict_loads_what_there_is(two: list[dict[str, Any]]) -> None:
    for found in values(two, "not_strict"):
        assert found["waiting"] == ["model.norm.weight"]
        assert found["told"] == ["the files do not hold 'model.norm.weight'"]
