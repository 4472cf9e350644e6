"""The zoo: every architecture by family, built from its default config at full size, without memory for weights.

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

# family -> where transformers lists it, and what the family is called in tables
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
# What a constructor asks for in so many words where the default config does not have it.
_ASKED_FOR: dict[str, dict[str, Any]] = {
    "ReformerModelWithLMHead": {"is_decoder": True},
    "MoonshineForConditionalGeneration": {"pad_token_id": 0},
    "Wav2Vec2BertForCTC": {"vocab_size": 32},
    "Wav2Vec2ConformerForCTC": {"vocab_size": 32},
}
# Where pictures are otherwise resized to a side drawn at random, so that no two steps have the same shapes.
_ASKED_OF_CONSTRUCTORS: dict[str, dict[str, Any]] = {"keypointrcnn_resnet50_fpn": {"min_size": 800}}


class NotBuilt(Exception):
    """The default config gives no model, on the meta device or on the CPU."""


def told(error: BaseException) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def title(family: str) -> str:
    """How a family is called in tables."""
    if family in TRANSFORMERS:
        return TRANSFORMERS[family][1]
    return TORCHVISION.get(family, family)


def architectures(family: str) -> list[str]:
    """The names of a family, in the order of its registry; ImportError where its package is not installed."""
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
    """Of timm, the first architecture by name of each of its modules: a kind of model each."""
    declare_torchvision_operators()
    timm = importlib.import_module("timm")
    return [timm.list_models(module=name)[0] for name in timm.list_modules()]


def build(family: str, name: str, *, on_cpu: bool = False) -> tuple[nn.Module, str]:
    """The model in training mode, on the meta device, and the device it was made on; `on_cpu`: with data, on the CPU.

    Some constructors read numbers from tensors (`linspace(...).item()`), which has no answer on the meta device:
    they run on the CPU, and the model is moved.
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
    """A composite of two models of free choice has no default config: it gets the defaults of two common ones."""
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
        text.pad_token_id = 0  # the library refuses several sequences without a padding token
    made: nn.Module = architecture(config)
    return made


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice on weights and configs that libraries print while a model is made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
