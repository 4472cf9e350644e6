"""Example inputs of architectures for which only their code says what they need: patches, codecs, time series, ...

There is one function of (config, batch) per architecture. Sizes come from the config if it has them. Inputs from which
the code derives a shape have known values (grids, padding masks, positions of pictures in a text).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from zoo_sessions import SESSIONS
from zoo_shapes import floats, integers, ones
from zoo_sound import SOUND

from autopar.tracing import known

Example = dict[str, Any]
_DOWN, _ACROSS = 8, 8  # patches of a picture that is passed as patches


def _grid(t: int = 1) -> Any:
    """The numbers of patches of a picture: over time, down, across."""
    return known(torch.tensor([[t, _DOWN, _ACROSS]]))


def _series(c: Any, batch: int) -> Example:
    return {"past_values": floats(batch, c.context_length, c.num_input_channels)}


def _pair(c: Any, batch: int) -> Example:
    return {"pixel_values": floats(batch, 2, 3, 480, 640)}


def _square(side: int) -> Callable[[Any, int], Example]:
    return lambda c, batch: {"pixel_values": floats(batch, 3, side, side)}


def _patches(width: int) -> Callable[[Any, int], Example]:
    return lambda c, batch: {"pixel_values": floats(_DOWN * _ACROSS, width), "grid_thw": _grid()}


def _text(batch: int, length: int) -> Any:
    """Text with known tokens."""
    return known(torch.arange(batch * length).view(batch, length) % 50 + 100)


def _text_with(token: int, count: int, batch: int, length: int) -> Any:
    """Text with known tokens, `count` of which are the placeholder `token` of a picture."""
    text = _text(batch, length)
    text.tensor[:, 1 : 1 + count] = token
    return text


def _decision(c: Any, batch: int) -> Example:
    steps = 20
    return {
        "states": floats(batch, steps, c.state_dim),
        "actions": floats(batch, steps, c.act_dim),
        "rewards": floats(batch, steps, 1),
        "returns_to_go": floats(batch, steps, 1),
        "timesteps": integers(batch, steps),
    }


def _seggpt(c: Any, batch: int) -> Example:
    height, width = c.image_size
    return {
        name: floats(batch, 3, height // 2, width) for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")
    }


def _gemma4_vision(c: Any, batch: int) -> Example:
    side = 3 * c.pooling_kernel_size
    rows = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).reshape(1, -1, 2)
    return {
        "pixel_values": floats(batch, side * side, 3 * c.patch_size**2),
        "pixel_position_ids": known(rows.repeat(batch, 1, 1)),
    }


def _omdet(c: Any, batch: int) -> Example:
    words = c.text_config.max_position_embeddings
    return {
        "pixel_values": floats(batch, 3, c.image_size, c.image_size),
        "classes_input_ids": _text(2 * batch, words),
        "classes_attention_mask": ones(2 * batch, words),
        "tasks_input_ids": _text(batch, words),
        "tasks_attention_mask": ones(batch, words),
        "classes_structure": known(torch.full((batch,), 2)),
    }


def _kosmos(c: Any, batch: int) -> Example:
    length, places = 256, torch.zeros(batch, 256, dtype=torch.bool)
    places[:, 1 : 1 + c.latent_query_num] = True
    side = c.vision_config.image_size
    return {
        "pixel_values": floats(batch, 3, side, side),
        "input_ids": integers(batch, length),
        "image_embeds_position_mask": known(places),
    }


def _pi0(c: Any, batch: int) -> Example:
    vision = c.vlm_config.vision_config
    per_picture = (vision.image_size // vision.patch_size) ** 2
    length = per_picture + 32
    return {
        "action_embeds": floats(batch, c.chunk_size, c.dit_config.hidden_size),
        "input_ids": _text_with(c.vlm_config.image_token_id, per_picture, batch, length),
        "pixel_values": floats(batch, 1, 3, vision.image_size, vision.image_size),
        "attention_mask": ones(batch, length),
        "pixel_attention_mask": ones(batch, 1, dtype=torch.bool),
    }


def _timesfm(c: Any, batch: int) -> Example:
    values = floats(batch, c.context_length)
    return {"past_values": values, "past_values_padding": torch.empty_like(values), "freq": integers(batch, 1)}


PARTICULAR: dict[str, Callable[[Any, int], Example]] = {
    **SOUND,
    **SESSIONS,
    "Blip2QFormerModel": lambda c, batch: {
        "query_embeds": floats(batch, 32, c.hidden_size),
        "encoder_hidden_states": floats(batch, 257, c.encoder_hidden_size),
    },
    "BltForCausalLM": lambda c, batch: {
        "input_ids": integers(batch, 512),
        "patch_lengths": known(torch.full((batch, 512 // c.patch_size), c.patch_size)),
        "labels": integers(batch, 512),
    },
    "DecisionTransformerModel": _decision,
    "DepthProModel": _square(1536),
    "EdgeTamModel": _square(1024),
    "EdgeTamVisionModel": _square(1024),
    "EfficientLoFTRModel": _pair,
    "Gemma4VisionModel": _gemma4_vision,
    "HunYuanVLVisionTransformer": lambda c, batch: {
        "pixel_values": floats(_DOWN * _ACROSS, 3 * c.patch_size**2),
        "grid_thw": _grid(),
    },
    "IdeficsModel": lambda c, batch: {
        "input_ids": integers(batch, 256),
        "pixel_values": floats(batch, 1, 3, c.vision_config.image_size, c.vision_config.image_size),
        "image_attention_mask": integers(batch, 256, 1),
    },
    "Inkling2VisionModel": lambda c, batch: {
        "pixel_values": floats(_DOWN * _ACROSS, *2 * (c.spatial_merge_size * c.patch_size,), c.num_channels),
        "image_grid_thw": _grid(),
    },
    "InstructBlipModel": lambda c, batch: {
        "pixel_values": floats(batch, 3, c.vision_config.image_size, c.vision_config.image_size),
        "qformer_input_ids": integers(batch, 64),
        "input_ids": integers(batch, 256),
    },
    "InstructBlipVideoModel": lambda c, batch: {
        "pixel_values": floats(batch, 4, 3, c.vision_config.image_size, c.vision_config.image_size),
        "qformer_input_ids": integers(batch, 64),
        "input_ids": integers(batch, 256),
    },
    "Kimi_K25VisionModel": lambda c, batch: {
        "pixel_values": floats(_DOWN * _ACROSS, 3, c.patch_size, c.patch_size),
        "grid_thw": _grid(),
    },
    "Kosmos2Model": _kosmos,
    "LightGlueForKeypointMatching": _pair,
    "LwDetrModel": _square(512),
    "MiniCPMOcrVisionModel": lambda c, batch: {
        "pixel_values": floats(1, 3, c.patch_size, _DOWN * _ACROSS * c.patch_size),
        "target_sizes": known(torch.tensor([[_DOWN, _ACROSS]])),
    },
    "MiniCPMV4_7VisionModel": lambda c, batch: {
        "pixel_values": floats(1, 3, c.patch_size, _DOWN * _ACROSS * c.patch_size),
        "target_sizes": known(torch.tensor([[_DOWN, _ACROSS]])),
    },
    "Molmo2Model": lambda c, batch: {"input_ids": integers(batch, 512), "mm_token_type_ids": integers(batch, 512)},
    "MuseGlimmerAssistantModel": lambda c, batch: {
        "noise_embeds": floats(batch, 16, c.hidden_size),
        "context_hidden_states": floats(batch, 64, len(c.target_layer_ids) * c.hidden_size),
    },
    "MuseGlimmerVisionModel": _patches(1176),
    "MuseSparkVisionModel": _patches(1176),
    "OmDetTurboForObjectDetection": _omdet,
    "OneFormerModel": lambda c, batch: {
        "pixel_values": floats(batch, 3, 512, 512),
        "task_inputs": floats(batch, c.task_seq_len),
    },
    "PI0Model": _pi0,
    "PatchTSMixerModel": _series,
    "PatchTSTModel": _series,
    "PeVideoEncoder": lambda c, batch: {"pixel_values_videos": floats(batch, 16, 3, 336, 336)},
    "PeVideoModel": lambda c, batch: {
        "input_ids": integers(batch, 64),
        "pixel_values_videos": floats(batch, 16, 3, 336, 336),
    },
    "PerceiverForMaskedLM": lambda c, batch: {
        "inputs": integers(batch, c.max_position_embeddings),
        "labels": integers(batch, c.max_position_embeddings),
    },
    "PerceiverModel": lambda c, batch: {"inputs": floats(batch, 512, c.d_model)},
    "RfDetrModel": _square(512),
    "Sam2Model": _square(1024),
    "SegGptModel": _seggpt,
    "ShieldGemma2ForImageClassification": lambda c, batch: {  # labels are per token
        "input_ids": integers(batch, 512),
        "labels": integers(batch, 512),
    },
    "TimesFm2_5Model": lambda c, batch: {"past_values": floats(batch, c.context_length)},
    "TimesFmModel": _timesfm,
    "TvpModel": lambda c, batch: {
        "input_ids": integers(1, 32),  # a batch of 1: its position ids have that shape
        "pixel_values": floats(1, c.num_frames, 3, c.max_img_size, c.max_img_size),
        "attention_mask": integers(1, 32),
    },
    "UdopModel": lambda c, batch: {
        "input_ids": integers(batch, 256),
        "bbox": known(torch.rand(batch, 256, 4).sort(-1).values[..., [0, 1, 2, 3]]),
        "pixel_values": floats(batch, 3, c.image_size, c.image_size),
        "decoder_input_ids": integers(batch, 64),
    },
    "VJEPA2Model": lambda c, batch: {
        "pixel_values_videos": floats(batch, c.frames_per_clip, 3, c.crop_size, c.crop_size)
    },
    "VideoLlama3VisionModel": lambda c, batch: {
        "pixel_values": floats(_DOWN * _ACROSS, 3 * c.patch_size**2),
        "grid_thw": _grid(),
        "merge_sizes": known(torch.tensor([2])),
    },
    "ViltModel": lambda c, batch: {
        "input_ids": integers(batch, c.max_position_embeddings),
        "pixel_values": floats(batch, 3, c.image_size, c.image_size),
        "pixel_mask": ones(batch, c.image_size, c.image_size),
    },
}
