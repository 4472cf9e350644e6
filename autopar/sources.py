"""Models that the command line names, built on the meta device, with example inputs.

A name is one of the zoo (`gpt2`), `hf:ARCHITECTURE`, or `module:function`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.tracing.places import raised_at
from autopar.user_warnings import warn
from autopar.zoo import ZOO

_POSITIONS = ("wpe", "position_embeddings", "embed_positions")  # modules of learned positions, in transformers


@dataclass(frozen=True)
class Source:
    """A model, examples of its inputs by name, and the loss function if the model does not compute the loss itself."""

    model: nn.Module
    meta_args: Mapping[str, Any]
    loss_fn: Callable[..., torch.Tensor] | None = None


def load_source(
    text: str, *, batch: int | None = None, sequence: int | None = None, config: Path | None = None
) -> Source:
    """Build the model that `text` names on the meta device, which needs no memory for weights.

    `batch`: rows of the examples (one micro-batch of the whole mesh). `sequence`: length of text inputs (default: the
    longest that the config allows, at most 2048). `config`: a Hugging Face config as JSON. If `text` names a function
    that returns its own examples, `batch` and `sequence` are an error; otherwise `batch` is required.

    Raises InputError if the text, the config or the user's function is at fault.
    """
    kind, colon, name = text.partition(":")
    if kind == "hf" and name:
        values = _read_config(config) if config is not None else {}
        return _hugging_face(text, name, batch, sequence, values, config or "its default config")
    if config is not None:
        other = (
            f"the config of {text} is that of the zoo: write hf:{ZOO[text].architecture} with yours"
            if text in ZOO
            else "a function of your own reads its config itself"
        )
        raise InputError(f"--config goes with hf:ARCHITECTURE; {other}")
    if text in ZOO:
        entry = ZOO[text]
        return _hugging_face(text, entry.architecture, batch, sequence, dict(entry.config), f"the config of {text}")
    if not colon or not kind or not name:
        raise InputError(
            f"{text!r} is not a model: write a name that `autopar zoo` lists, hf:ARCHITECTURE (hf:GPT2LMHeadModel) or "
            f"module:function{_close(text, list(ZOO))}"
        )
    return _of_user(kind, name, batch, sequence)


def _user_function(module_name: str, function_name: str) -> Callable[[], Any]:
    """The user's function, which can be called without arguments."""
    if module_name.endswith(".py"):  # importing it would run the file, and then fail
        named = f"{Path(module_name).stem}:{function_name}"
        raise InputError(f"{module_name!r} is a file: run from its folder, and name its module, {named}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: modules of the current folder
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(f"there is no module {error.name!r} here: run from its folder, or install it") from error
    except Exception as error:
        raise InputError(f"importing {module_name!r} failed with {one_line(error)}") from error
    function = getattr(module, function_name, None)
    if hasattr(module, function_name) and not callable(function):
        kind = type(function).__name__
        raise InputError(f"{function_name!r} of module {module_name!r} is no function: it is of type {kind}")
    if function is None:
        raise InputError(
            f"module {module_name!r} has no function {function_name!r}{_close(function_name, dir(module))}"
        )
    if needed := _arguments(function):
        raise InputError(
            f"{module_name}:{function_name} takes {', '.join(needed)}, and is called without arguments: give "
            f"defaults{_defined_at(function)}"
        )
    return function


def _of_user(module_name: str, function_name: str, batch: int | None, sequence: int | None) -> Source:
    """What the user's function returns: a model, (model, meta_args) or (model, meta_args, loss_fn)."""
    function, name = _user_function(module_name, function_name), f"{module_name}:{function_name}"
    try:
        with torch.device("meta"):
            returned = function()
    except Exception as error:
        raise InputError(f"{name}() failed with {one_line(error)}") from error
    parts = returned if isinstance(returned, tuple) else (returned,)
    if not isinstance(parts[0], nn.Module) or len(parts) > 3:
        raise InputError(
            f"{name}() returned {type(returned).__name__}: it must return a torch.nn.Module, or (model, meta_args), or "
            "(model, meta_args, loss_fn)"
        )
    if len(parts) == 1:
        if not hasattr(parts[0], "config"):
            raise InputError(
                f"{name}() returned a model alone: return (model, meta_args) with examples of its inputs by name"
            )
        return Source(parts[0], example_inputs(parts[0], _needed(batch, name), sequence))
    options = [option for option, value in (("--batch", batch), ("--seq", sequence)) if value is not None]
    if options:
        raise InputError(
            f"{name}() returns its own examples, whose shapes say what {options[0]} would: leave {options[0]} out, or "
            "return the model alone"
        )
    return Source(*parts)


def _arguments(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return []
    variable_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable_kinds]


def _defined_at(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" [at {code.co_filename}:{code.co_firstlineno}]" if code is not None else ""


def _needed(batch: int | None, name: str) -> int:
    if batch is None:
        raise InputError(f"{name} brings no examples of its inputs: give --batch (and --seq for text)")
    return batch


def _hugging_face(
    text: str, name: str, batch: int | None, sequence: int | None, values: dict[str, Any], origin: str | Path
) -> Source:
    try:
        import transformers
    except ImportError as error:
        raise InputError("hf: models need the package transformers: pip install 'autopar[examples]'") from error
    transformers.logging.set_verbosity_error()  # its warnings about weights and losses do not matter for planning
    architecture: Any = getattr(transformers, name, None)
    is_model = inspect.isclass(architecture) and issubclass(architecture, transformers.PreTrainedModel)
    if not is_model:
        names = [other for other in dir(transformers) if other.endswith(("Model", "LM")) or "For" in other]
        mend = _close(name, names) or ": name one as in hf:GPT2LMHeadModel"
        raise InputError(f"transformers {transformers.__version__} has no architecture {name!r}{mend}")
    if architecture.config_class is None:
        raise InputError(f"{name} is abstract: name an architecture of one model, such as hf:GPT2LMHeadModel")
    needed = _needed(batch, text)
    try:
        config = architecture.config_class.from_dict(values)
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0  # every checkpoint's config has it, default configs lack it
        with torch.device("meta"):
            model = architecture(config)
    except Exception as error:
        raise InputError(f"{name} could not be built from {origin}: {one_line(error)}") from error
    if isinstance(origin, Path):
        _check_fields(type(config), values, origin)
    return Source(model.train(), example_inputs(model, needed, sequence))


def _check_fields(config_class: Any, values: Mapping[str, Any], path: Path) -> None:
    """Warn of fields that are probably misspelt, as transformers accepts any; InputError if it knows none of them."""
    try:
        known_fields = {*config_class().to_dict(), *getattr(config_class, "attribute_map", {})}
    except Exception:  # a config class of third-party code may have no default
        return
    near = {
        field: difflib.get_close_matches(field, known_fields - values.keys(), 1, 0.8)
        for field in values.keys() - known_fields
    }
    suggestions = [f"{field!r}: did you mean {names[0]!r}?" for field, names in sorted(near.items()) if names]
    if values and known_fields.isdisjoint(values):
        words = ", ".join(suggestions) or "its fields"
        raise InputError(f"{path} holds no config: {config_class.__name__} does not know {words}")
    if suggestions:
        warn(f"{path} has fields that {config_class.__name__} does not know, {', '.join(suggestions)}")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"no config can be read from {path}: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no config: it must be a JSON object")
    return values


def example_inputs(model: nn.Module, batch: int, sequence: int | None = None) -> dict[str, torch.Tensor]:
    """Examples of a Hugging Face model's training inputs, on the meta device: text, pictures or speech, and labels."""
    config: Any = model.config
    parameters = inspect.signature(model.forward).parameters
    if "labels" not in parameters and "start_positions" not in parameters:
        raise InputError(
            f"{type(model).__name__} returns no loss (its forward takes no labels): name the architecture with a head, "
            "such as GPT2LMHeadModel in place of GPT2Model"
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    length = sequence if sequence is not None else min(_longest(text), 2048)
    _check_positions(model, length)
    inputs = {}
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values" or "pixel_values" in parameters:
        inputs["pixel_values"] = torch.empty(batch, *_picture(config), device="meta")
    if main == "input_features":
        frames = 2 * config.max_source_positions
        inputs["input_features"] = torch.empty(batch, config.num_mel_bins, frames, device="meta")
    if main == "input_ids" or (main == "pixel_values" and "input_ids" in parameters):
        inputs["input_ids"] = _integers(batch, length)
    if not inputs:
        raise InputError(
            f"{type(model).__name__} takes {main!r}, of which no example can be made from its config: give a function "
            "module:function that returns (model, meta_args)"
        )
    return {**inputs, **_labels(model, parameters, batch, length)}


def _labels(model: nn.Module, parameters: Mapping[str, Any], batch: int, length: int) -> dict[str, torch.Tensor]:
    """Labels as the head wants them: per token, sequence, picture or pixel; two positions for question answering."""
    if "start_positions" in parameters:
        return {"start_positions": _integers(batch), "end_positions": _integers(batch)}
    name = type(model).__name__
    if name.endswith(("ForSequenceClassification", "ForImageClassification", "ForNextSentencePrediction")):
        return {"labels": _integers(batch)}
    if name.endswith("ForSemanticSegmentation"):
        return {"labels": _integers(batch, *_picture(model.config)[1:])}
    return {"labels": _integers(batch, length)}


def _integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _picture(config: Any) -> tuple[int, int, int]:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return getattr(vision, "num_channels", 3), height, width


def _longest(config: Any) -> int:
    """The longest text in tokens; for a speech model, that of its decoder. 512 if the config has no such field."""
    for name in ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length", "seq_length"):
        if isinstance(value := getattr(config, name, None), int) and value > 0:
            return value
    return 512


def _check_positions(model: nn.Module, length: int) -> None:
    """InputError if the sequence is longer than the learned positions: on the meta device nothing checks indices."""
    for name, module in model.named_modules():
        learned = isinstance(module, nn.Embedding) and name.endswith(_POSITIONS)
        if learned and module.num_embeddings < length:
            raise InputError(
                f"the sequence of {length} is longer than the {module.num_embeddings} learned positions of {name}: "
                "take a shorter one, or a config with more positions"
            )


def _close(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {close[0]}?" if close else ""


def one_line(error: Exception) -> str:
    """An error of foreign code on one line, with its place: the user's line that led to it, else where it rose."""
    frames = traceback.extract_tb(error.__traceback__)
    place = raised_at(error) or (f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "")
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place and f' [at {place}]'}"
