"""Shapes of pictures, clips and sounds by config, and inputs that models take beside their main one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from autopar.tracing import known

_PATCHES = (8, 8)  # down and across, of a picture that is passed as patches
_FRAMES = 200  # of sound


def integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def floats(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def ones(*shape: int, dtype: torch.dtype = torch.int64) -> Any:
    """A mask of ones with known values, which hides nothing."""
    return known(torch.ones(shape, dtype=dtype))


def picture(config: Any) -> tuple[int, int, int]:
    """Channels, height and width in a vision config."""
    size = getattr(config, "image_size", None) or 224
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    return int(channels), int(height), int(width)


def other_shapes(config: Any, parameters: Mapping[str, inspect.Parameter], batch: int) -> Iterator[dict[str, Any]]:
    """Further guesses, which update the first guess at a model's inputs, as its signature and config suggest."""
    vision = getattr(config, "vision_config", config)
    if "pixel_values" in parameters and (frames := first_int(vision, ("num_frames",))):
        yield {"pixel_values": torch.empty(batch, frames, *picture(vision), device="meta")}
    if "pixel_values" in parameters and "spatial_shapes" in parameters:  # pictures are passed as patches
        yield _cut(vision, batch)
    if "input_values" in parameters:  # sound with a dim for its channels
        yield {"input_values": torch.empty(batch, 1, 32_000, device="meta")}
    sound = next((name for name in ("input_features", "input_values") if name in parameters), None)
    for mask in ("attention_mask", "input_features_mask", "padding_mask"):
        if sound is not None and mask in parameters:
            audio = getattr(config, "encoder_config", None) or getattr(config, "audio_config", None) or config
            mels = first_int(audio, ("input_dim", "num_mel_bins", "feature_size", "input_size")) or 80
            for order in ((_FRAMES, mels), (mels, _FRAMES)):
                yield {
                    sound: torch.empty(batch, *order, device="meta"),
                    mask: known(torch.ones(batch, _FRAMES, dtype=torch.int64)),
                }
    if "visual_feats" in parameters:
        features = first_int(config, ("visual_feat_dim",)) or 2048
        yield {
            "visual_feats": torch.empty(batch, 36, features, device="meta"),
            "visual_pos": torch.empty(batch, 36, 4, device="meta"),
        }
    for grid in ("grid_thw", "image_grid_thw"):
        if grid in parameters:
            yield from _gridded(grid, vision, parameters)
    if "inputs" in parameters:
        yield {"inputs": integers(batch, first_int(config, ("max_position_embeddings",)) or 512)}
        yield {"inputs": torch.empty(batch, 3, 224, 224, device="meta")}
        yield {"inputs": torch.empty(batch, 32_000, device="meta"), "decoder_input_ids": integers(batch, 64)}
    if "input_ids" in parameters and (books := first_int(config, ("num_codebooks",))):
        yield {"input_ids": integers(batch, 64, books + 1)}
        yield {"input_ids": integers(batch * books, 64)}


def _cut(vision: Any, batch: int) -> dict[str, Any]:
    down, across = _PATCHES
    width = 3 * (first_int(vision, ("patch_size",)) or 16) ** 2
    return {
        "pixel_values": torch.empty(batch, down * across, width, device="meta"),
        "pixel_attention_mask": torch.empty(batch, down * across, dtype=torch.int64, device="meta"),
        "spatial_shapes": known(torch.tensor([_PATCHES] * batch)),
    }


def _gridded(grid: str, vision: Any, parameters: Mapping[str, inspect.Parameter]) -> Iterator[dict[str, Any]]:
    """The patches of one picture as a sequence, and their numbers down and across."""
    down, across = _PATCHES
    side = first_int(vision, ("patch_size",)) or 14
    width = 3 * side**2 * (first_int(vision, ("temporal_patch_size",)) or 1)
    known_grid = known(torch.tensor([[1, down, across]]))
    for name in ("hidden_states", "pixel_values"):
        if name in parameters:
            yield {name: torch.empty(down * across, width, device="meta"), grid: known_grid}


def first_int(config: Any, names: Sequence[str]) -> int | None:
    """The value of the first of these attributes that is a positive int; None if there is none."""
    return next((v for name in names if isinstance(v := getattr(config, name, None), int) and v > 0), None)
