"""The zoo: all architectures by family, built from their default configs at full size on the meta device.

Families of transformers are those of its Auto classes; torchvision's and timm's models come from their registries.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from zoo_torchvision import declare_torchvision_operators

# family -> (mapping in transformers that lists its architectures, title in tables)
TRANSFORMERS = {
    "causal-lm": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
    "masked-lm": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
    "seq2seq-lm": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
    "image-classification": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification"),
    "sequence-classification": (
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "AutoModelForSequenceClassification",
    ),
    "speech-seq2seq": ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "AutoModelForSpeechSeq2Seq"),
    "ctc": ("MODEL_FOR_CTC_MAPPING_NAMES", "AutoModelForCTC"),
    "base": ("MODEL_MAPPING_NAMES", "AutoModel"),
}
TORCHVISION = {
    "tv-classification": "torchvision.models",
    "tv-segmentation": "torchvision.models.segmentation",
    "tv-detection": "torchvision.models.detection",
    "tv-video": "torchvision.models.video",
    "tv-optical-flow": "torchvision.models.optical_flow",
    "tv-quantization": "torchvision.models.quantization",
}
FAMILIES = (*TRANSFORMERS, *TORCHVISION, "timm")
# Config fields without a default that constructors require, with an error that says so.
_ASKED_FOR: dict[str, dict[str, Any]] = {
    "ReformerModelWithLMHead": {"is_decoder": True},
    "MoonshineForConditionalGeneration": {"pad_token_id": 0},
    "Wav2Vec2BertForCTC": {"vocab_size": 32},
    "Wav2Vec2ConformerForCTC": {"vocab_size": 32},
}
# Constructor options: without them, pictures are resized to a random size, and each step has other shapes.
_ASKED_OF_CONSTRUCTORS: dict[str, dict[str, Any]] = {"keypointrcnn_resnet50_fpn": {"min_size": 800}}


class NotBuilt(Exception):
    """No model can be built from the default config, neither on the meta device nor on the CPU."""


def told(error: BaseException) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def title(family: str) -> str:
    """The title of a family in tables."""
    if family in TRANSFORMERS:
        return TRANSFORMERS[family][1]
    return TORCHVISION.get(family, family)


def architectures(family: str) -> list[str]:
    """The architectures of a family in the order of its registry; ImportError if its package is not installed."""
    declare_torchvision_operators()
    if family in TRANSFORMERS:
        from transformers.models.auto import modeling_auto

        listed = getattr(modeling_auto, TRANSFORMERS[family][0]).values()
        names = (name for entry in listed for name in (entry if isinstance(entry, (tuple, list)) else (entry,)))
        return list(dict.fromkeys(names))
    if family in TORCHVISION:
        listing = importlib.import_module("torchvision.models").list_models
        return list(listing(module=importlib.import_module(TORCHVISION[family])))
    return list(importlib.import_module("timm").list_models())


def one_of_each_kind() -> list[str]:
    """The first architecture, by name, of each module of timm; each module holds one kind of model."""
    declare_torchvision_operators()
    timm = importlib.import_module("timm")
    return [timm.list_models(module=name)[0] for name in timm.list_modules()]


def build(family: str, name: str, *, on_cpu: bool = False) -> tuple[nn.Module, str]:
    """A model in training mode on the meta device, and the device on which it was built.

    Some constructors read numbers from tensors (`linspace(...).item()`), which fails on the meta device: these models
    are built on the CPU and then moved. `on_cpu`: build the model on the CPU, and leave it there with its data.
    """
    declare_torchvision_operators()
    with _quiet():
        if on_cpu:
            return _make(family, name).train(), "cpu"
        try:
            with torch.device("meta"):
                return _make(family, name).train(), "meta"
        except Exception as first:
            try:
                return _make(family, name).to("meta").train(), "cpu"
            except Exception as error:
                same = str(error) == str(first)
                raise NotBuilt(told(first) if same else f"{told(first)}; on the CPU: {told(error)}") from first


def _make(family: str, name: str) -> nn.Module:
    if family in TRANSFORMERS:
        import transformers

        return _from_default_config(getattr(transformers, name))
    if family in TORCHVISION:
        options: dict[str, Any] = {"weights": None}
        if family in ("tv-segmentation", "tv-detection"):
            options["weights_backbone"] = None
        options |= _ASKED_OF_CONSTRUCTORS.get(name, {})
        made: nn.Module = importlib.import_module("torchvision.models").get_model(name, **options)
        return made
    created: nn.Module = importlib.import_module("timm").create_model(name, pretrained=False)
    return created


def _from_default_config(architecture: Any) -> nn.Module:
    """The model of the default config. A composite of two arbitrary models has none: it gets two common ones."""
    import transformers as hf

    composites = {
        "EncoderDecoderModel": lambda kind: kind.from_encoder_decoder_configs(hf.BertConfig(), hf.BertConfig()),
        "SpeechEncoderDecoderModel": lambda kind: kind.from_encoder_decoder_configs(
            hf.Wav2Vec2Config(), hf.BertConfig()
        ),
        "VisionTextDualEncoderModel": lambda kind: kind.from_vision_text_configs(hf.ViTConfig(), hf.BertConfig()),
    }
    kind = architecture.config_class
    config = composites[architecture.__name__](kind) if architecture.__name__ in composites else kind()
    for key, value in _ASKED_FOR.get(architecture.__name__, {}).items():
        setattr(config, key, value)
    text = config.get_text_config()
    if architecture.__name__.endswith("ForSequenceClassification") and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0  # required for batches of several sequences
    made: nn.Module = architecture(config)
    return made


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what libraries print about weights and configs while a model is built."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
