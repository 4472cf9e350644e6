"""Example training inputs of a model on the meta device, made from its config by modality.

Shapes follow the config (picture size, mel bins, channels). Inputs have known values only if the model's code derives
shapes from them: how pictures are cut into patches, and the lengths of packed parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from zoo_particular import PARTICULAR
from zoo_shapes import first_int, integers, other_shapes, picture

from autopar.tracing import known

_SECONDS_OF_SOUND = 2
_SAMPLING_RATE = 16_000
_MELS = ("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim")
_MODALITIES = ("input_ids", "bbox", "pixel_values", "pixel_values_videos", "input_features", "input_values")
_NO_LABELS = ("Dia",)  # models without labels per token
_WHOLE_WINDOWS = ("Whisper", "Qwen2Audio", "Voxtral")  # windows of fixed length, mel bins first
# Architectures with a single valid sequence length, as a function of the config.
_FIXED_LENGTHS: dict[str, Callable[[Any], int]] = {
    "Reformer": lambda config: config.axial_pos_shape[0] * config.axial_pos_shape[1],
}


def examples(family: str, model: nn.Module, batch: int, length: int) -> Iterator[dict[str, Any]]:
    """Guesses at the example inputs, likeliest first, by argument name; `length`: of text, limited by the config.

    The signature does not say what a model needs beside its main input; each guess is for a model that does not run
    with those before it. Raises ValueError if no example can be made.
    """
    if family.startswith("tv-"):
        yield _torchvision(family, model, batch)
    elif family == "timm":
        settings: Any = getattr(model, "pretrained_cfg")  # noqa: B009 - nn.Module's attributes are typed as tensors
        yield {"x": torch.empty(batch, *settings["input_size"], device="meta")}
    else:
        yield from _Maker(family, model, batch, length).guesses()


def _torchvision(family: str, model: nn.Module, batch: int) -> dict[str, Any]:
    """Inputs of a torchvision model, with the picture and clip sizes of the reference training recipes."""
    name = type(model).__name__
    if family == "tv-optical-flow":
        frames = torch.empty(batch, 3, 368, 496, device="meta")
        return {"image1": frames, "image2": torch.empty_like(frames)}
    if family == "tv-video":
        side, count = (224, 16) if name in ("MViT", "S3D", "SwinTransformer3d") else (112, 16)
        return {_first(model): torch.empty(batch, 3, count, side, side, device="meta")}
    if family == "tv-detection":
        images = [torch.empty(3, 480, 640, device="meta") for _ in range(batch)]
        return {"images": images, "targets": _boxes(name, batch)}
    side = {"Inception3": 299, "QuantizableInception3": 299}.get(name, 520 if family == "tv-segmentation" else 224)
    return {_first(model): torch.empty(batch, 3, side, side, device="meta")}


def _boxes(name: str, batch: int) -> list[dict[str, Any]]:
    """Detection targets with two boxes per picture; their values are known, because models check the boxes."""
    boxes, labels = torch.tensor([[10.0, 10.0, 90.0, 90.0], [50.0, 40.0, 300.0, 200.0]]), torch.tensor([1, 2])
    target: dict[str, Any] = {"boxes": known(boxes), "labels": known(labels)}
    if name == "MaskRCNN":
        target["masks"] = torch.empty(2, 480, 640, dtype=torch.uint8, device="meta")
    if name == "KeypointRCNN":
        target["keypoints"] = torch.empty(2, 17, 3, device="meta")
    return [dict(target) for _ in range(batch)]


def _first(model: nn.Module) -> str:
    return next(iter(inspect.signature(model.forward).parameters))


def known_text(config: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Replacements for text inputs with known tokens, an end token and no padding; {} if there is no text."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        return {}
    tokens = torch.arange(ids.numel()).view(ids.shape) % 50 + 100
    end = getattr(config, "eos_token_id", None)
    if isinstance(end, int):
        tokens[:, -1] = end
    text = {"input_ids": known(tokens)}
    for name in ("labels", "decoder_input_ids"):
        if isinstance(inputs.get(name), torch.Tensor):
            text[name] = known(torch.full(inputs[name].shape, 1 if name == "labels" else 3))
    return text


class _Maker:
    """Makes the inputs of one transformers model."""

    def __init__(self, family: str, model: nn.Module, batch: int, length: int) -> None:
        self.family, self.model, self.batch = family, model, batch
        self.config: Any = model.config
        self.parameters: Mapping[str, inspect.Parameter] = inspect.signature(model.forward).parameters
        text_config = getattr(self.config, "get_text_config", None)
        self.text: Any = text_config() if text_config is not None else self.config
        self.main = getattr(model, "main_input_name", "input_ids")
        name = type(model).__name__
        fixed = next((f for prefix, f in _FIXED_LENGTHS.items() if name.startswith(prefix)), None)
        self.length = fixed(self.config) if fixed else min(length, _longest(self.text) // 2)  # not the maximum
        musical = self.family == "causal-lm" and name.startswith("Musicgen")
        self.codebooks = (first_int(self.text, ("num_codebooks",)) or 0) if musical else 0

    def guesses(self) -> Iterator[dict[str, Any]]:
        """The example for this very architecture, if there is one; else the main and required inputs, then with all
        modalities, then with other shapes."""
        particular = PARTICULAR.get(type(self.model).__name__)
        if particular is not None:
            yield particular(self.config, self.batch)
            return
        failure: ValueError | None = None
        first: dict[str, Any] = {}
        try:
            first = self.make()
            yield first
        except ValueError as error:
            failure = error
        everything = {name: getattr(self, f"_{name}")()[name] for name in _MODALITIES if name in self.parameters}
        for further in (everything, *other_shapes(self.config, self.parameters, self.batch)):
            if further.keys() - first.keys() or any(further[n].shape != first[n].shape for n in further):
                failure = None
                yield first | further
        if failure is not None:
            raise failure

    def make(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if self.codebooks:
            rows = integers(self.batch * self.codebooks, self.length)
            return {"input_ids": rows, "labels": integers(self.batch, self.length, self.codebooks)}
        for name in _MODALITIES:
            if self._wanted(name):
                made |= getattr(self, f"_{name}")()
        if self.main not in made and self.main in self.parameters and not made:
            raise ValueError(f"{type(self.model).__name__} takes {self.main!r}: no example of it is made here")
        if not made:
            raise ValueError(f"no example is made for {type(self.model).__name__}: {', '.join(self.parameters)}")
        return made | self._decoder(made) | self._known(made) | self._labels()

    def _known(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs beside the text on which the model's control flow depends."""
        values = {"lengths": self.length, "lang_ids": 0}  # number of tokens without padding; language of the adapter
        wanted = [name for name in values if name in self.parameters and "input_ids" in made]
        found = {name: known(torch.full((self.batch,), values[name])) for name in wanted}
        patch = first_int(self.config, ("patch_size",))
        if "patch_lengths" in self.parameters and patch and "input_ids" in made:  # bytes per patch
            found["patch_lengths"] = known(torch.full((self.batch, self.length // patch), patch))
        return found

    def _wanted(self, name: str) -> bool:
        """Whether an input is needed: the main input, required ones, text with pictures or sound, boxes of words."""
        if name not in self.parameters:
            return False
        kind = type(self.model).__name__
        if name in (self.main, "bbox") or self.parameters[name].default is inspect.Parameter.empty:
            return True
        if name == "pixel_values" and kind == "GitForCausalLM":
            return True  # GIT removes a picture's tokens from its logits even without a picture
        if self.family != "base" and not name.startswith("input_ids"):
            return False
        encoder_decoder = getattr(self.config, "is_encoder_decoder", False)
        return name == "input_ids" and self.main != "input_ids" and not encoder_decoder

    def _input_ids(self) -> dict[str, Any]:
        return {"input_ids": integers(self.batch, self.length)}

    def _bbox(self) -> dict[str, Any]:
        return {"bbox": integers(self.batch, self.length, 4)}

    def _pixel_values(self) -> dict[str, Any]:
        vision = getattr(self.config, "vision_config", self.config)
        channels, height, width = picture(vision)
        return {"pixel_values": torch.empty(self.batch, channels, height, width, device="meta")}

    def _pixel_values_videos(self) -> dict[str, Any]:
        vision = getattr(self.config, "vision_config", self.config)
        frames = first_int(vision, ("num_frames", "frames_per_clip")) or 16
        channels, height, width = picture(vision)
        return {"pixel_values_videos": torch.empty(self.batch, frames, channels, height, width, device="meta")}

    def _input_features(self) -> dict[str, Any]:
        parts = (getattr(self.config, name, None) for name in ("audio_config", "encoder_config"))
        audio = next((part for part in parts if part is not None), self.config)
        mels = first_int(audio, _MELS) or 80
        positions = first_int(audio, ("max_source_positions",))
        if positions is not None and type(self.model).__name__.startswith(_WHOLE_WINDOWS):
            return {"input_features": torch.empty(self.batch, mels, 2 * positions, device="meta")}
        return {"input_features": torch.empty(self.batch, 100 * _SECONDS_OF_SOUND, mels, device="meta")}

    def _input_values(self) -> dict[str, Any]:
        frames, mels = first_int(self.config, ("max_length",)), first_int(self.config, ("num_mel_bins",))
        if frames and mels and self.family == "base":  # a spectrogram of fixed length
            return {"input_values": torch.empty(self.batch, frames, mels, device="meta")}
        return {"input_values": torch.empty(self.batch, _SECONDS_OF_SOUND * _SAMPLING_RATE, device="meta")}

    def _decoder(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """Decoder inputs, if the model does not derive them from labels."""
        if type(self.model).__name__.startswith("Dia"):  # one code per channel and position
            return {"decoder_input_ids": integers(self.batch, 64, self.config.decoder_config.num_channels)}
        headed = self.family in ("seq2seq-lm", "speech-seq2seq", "sequence-classification")
        starts = getattr(self.config, "decoder_start_token_id", None) is not None
        shifted = headed and starts and not type(self.model).__name__.startswith("FSMT")
        if "decoder_input_ids" not in self.parameters or shifted:
            return {}
        length = self.length if self.family.endswith("masked-lm") else min(self.length, 64)  # as many as labels
        return {"decoder_input_ids": integers(self.batch, length)}

    def _labels(self) -> dict[str, Any]:
        """Labels as the head wants them: per token, sequence or picture."""
        if "labels" not in self.parameters or self.family == "base":
            return {}
        if self.family.endswith("classification"):
            return {"labels": integers(self.batch)}
        if type(self.model).__name__.startswith(_NO_LABELS):
            return {}
        if self.family == "ctc":  # the model first compares them with its vocabulary size
            return {"labels": known(torch.ones(self.batch, min(self.length, 64), dtype=torch.int64))}
        if self.family in ("seq2seq-lm", "speech-seq2seq") and getattr(self.config, "is_encoder_decoder", False):
            return {"labels": integers(self.batch, min(self.length, 64))}
        return {"labels": integers(self.batch, self.length)}


def _longest(config: Any) -> int:
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
    return first_int(config, names) or 512
