"""Example inputs of sound models for which only their code says what they need: spectrograms, waves, codec latents.

There is one function of (config, batch) per architecture, as in `zoo_particular`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from zoo_shapes import floats, integers, ones

from autopar.tracing import known

Example = dict[str, Any]


def _latents(c: Any, batch: int) -> Example:
    return {"latents": floats(batch, c.hidden_size, 25)}


def _sound(samples: int) -> Callable[[Any, int], Example]:
    return lambda c, batch: {"input_values": floats(batch, 1, samples)}


def _mels(bins: int, frames: int, *, bins_first: bool = False, mask: str = "") -> Callable[[Any, int], Example]:
    def make(c: Any, batch: int) -> Example:
        shape = (bins, frames) if bins_first else (frames, bins)
        made: Example = {"input_features": floats(batch, *shape)}
        return made | ({mask: ones(batch, frames)} if mask else {})

    return make


def _fastspeech(c: Any, batch: int) -> Example:
    tokens, frames = 64, 128
    config = getattr(c, "model_config", c)
    return {
        "input_ids": integers(batch, tokens),
        "spectrogram_labels": known(torch.rand(batch, frames, config.num_mel_bins)),
        "duration_labels": known(torch.full((batch, tokens), frames // tokens)),
        "pitch_labels": floats(batch, tokens, 1),
        "energy_labels": floats(batch, tokens, 1),
    }


def _voxtral(c: Any, batch: int) -> Example:
    """Voxtral has eight frames of sound per token."""
    return {"input_ids": integers(batch, 100), "input_features": floats(batch, c.audio_config.num_mel_bins, 800)}


SOUND: dict[str, Callable[[Any, int], Example]] = {
    "AudioFlamingo3Encoder": _mels(128, 3000, bins_first=True, mask="input_features_mask"),
    "ClapModel": lambda c, batch: {
        "input_ids": integers(batch, 64),
        "input_features": floats(batch, 1, 1024, c.audio_config.num_mel_bins),
        "is_longer": known(torch.zeros(batch, 1, dtype=torch.bool)),
    },
    "ClvpModelForConditionalGeneration": lambda c, batch: {
        "input_ids": integers(batch, 64),
        "input_features": floats(batch, c.decoder_config.feature_size, 500),
    },
    "EncodecModel": lambda c, batch: {"input_values": floats(batch, c.audio_channels, 24_000)},
    "FastSpeech2ConformerModel": _fastspeech,
    "FastSpeech2ConformerWithHifiGan": _fastspeech,
    "FunAsrNanoEncoder": _mels(560, 200, mask="input_features_mask"),
    "Gemma3nAudioEncoder": lambda c, batch: {
        "audio_mel": floats(batch, 200, c.input_feat_size),
        "audio_mel_mask": known(torch.zeros(batch, 200, dtype=torch.bool)),
    },
    "Gemma4AudioModel": _mels(128, 200, mask="attention_mask"),
    "GlmAsrEncoder": _mels(128, 3000, bins_first=True),
    "GraniteSpeech5Encoder": _mels(320, 400),
    "GraniteSpeech5ForCTC": _mels(320, 400),
    "KyutaiSpeechToTextForConditionalGeneration": lambda c, batch: {
        "input_ids": integers(batch, 256, c.num_codebooks + 1),
        "labels": integers(batch, 256),
    },
    "MimiDecoderModel": _latents,
    "MimiEncoderModel": _sound(24_000),
    "MimiModel": _sound(24_000),
    "MossTranscribeDiarizeAudioModel": _mels(80, 3000, bins_first=True),
    "MuseSparkAudioModel": lambda c, batch: {"input_values": floats(batch, 20 * c.samples_per_token)},
    "Nemotron3_5TranscribeAudioModel": _mels(128, 200, mask="input_features_mask"),
    "Nemotron3_5TranscribeWordTimestampModel": lambda c, batch: {"inputs_embeds": floats(batch, 64, c.hidden_size)},
    "NeuCodecModel": lambda c, batch: {
        "input_values": floats(batch, 1, 32_000),
        "input_features": floats(batch, 100, 160),
    },
    "PeAudioVideoEncoder": lambda c, batch: {
        "input_values": floats(batch, 1, 32_000),
        "pixel_values_videos": floats(batch, 16, 3, 336, 336),
    },
    "PocketTTSAudioTokenizerDecoderModel": _latents,
    "PocketTTSAudioTokenizerEncoderModel": _sound(24_000),
    "PocketTTSAudioTokenizerModel": _sound(24_000),
    "SpeechT5Model": lambda c, batch: {
        "input_values": floats(batch, 200, c.hidden_size),
        "decoder_input_values": floats(batch, 64, c.hidden_size),
    },
    "VibeVoiceAcousticTokenizerDecoderModel": lambda c, batch: {"hidden_states": floats(batch, c.hidden_size, 16)},
    "VibeVoiceAcousticTokenizerEncoderModel": lambda c, batch: {"hidden_states": floats(batch, 1, 51_200)},
    "VoxtralRealtimeForConditionalGeneration": lambda c, batch: _voxtral(c, batch) | {"labels": integers(batch, 100)},
    "VoxtralRealtimeModel": _voxtral,
    "Xcodec2Model": lambda c, batch: {
        "input_values": floats(batch, 1, 32_000),
        "input_features": floats(batch, 100, 160),
    },
}
