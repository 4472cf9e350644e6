"""Small models of many architectures of transformers, in float64 without dropout, with example inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

Inputs = dict[str, torch.Tensor]
BATCH, LENGTH, VOCABULARY = 8, 12, 64
# Sizes under the names that various configs use; those names that a config has are set.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim",), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers",), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    "num_key_value_heads": 4,
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    "n_inner": 48,
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k"), 2),
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
    "use_cache": False,
    "image_size": 16,
    "patch_size": 4,
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0),
}


def text(length: int = LENGTH) -> Inputs:
    """Tokens, and labels of which many are ignored, unevenly over the batch."""
    ids = torch.randint(3, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(1))
    rows, places = torch.arange(BATCH).unsqueeze(1), torch.arange(length)
    return {"input_ids": ids, "labels": torch.where((rows * places) % 5 < 3, ids, -100)}


def translation() -> Inputs:
    return {**text(), "decoder_input_ids": text()["input_ids"].flip(1)}


def classes() -> Inputs:
    return {"input_ids": text()["input_ids"], "labels": torch.arange(BATCH) % 2}


def picture(size: int = 16) -> Inputs:
    pixels = torch.randn(BATCH, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": pixels, "labels": torch.arange(BATCH) % 2}


def built(name: str, **given: Any) -> nn.Module:
    """A model with a small config; of `_SMALL` the names that its config has are set."""
    architecture = getattr(hf, name)
    fresh = architecture.config_class()
    own = {key for key in _SMALL if getattr(fresh, key, None) is not None and key not in fresh.attribute_map}
    derived = {key for key in own if isinstance(getattr(type(fresh), key, None), property)}
    small = {key: value for key, value in _SMALL.items() if key in own - derived}
    small |= {key: 0.0 for key, value in fresh.to_dict().items() if "drop" in key and isinstance(value, float)}
    small |= given
    torch.manual_seed(0)
    model = architecture(architecture.config_class(**small)).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the grouped kernel has no float64
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


Make = Callable[[], tuple[nn.Module, Inputs]]


def case(name: str, inputs: Callable[[], Inputs] = text, **given: Any) -> Make:
    return lambda: (built(name, **given), inputs())


def large_picture() -> Inputs:
    return picture(32)


def sound() -> Inputs:
    """A short piece of noise as audio input."""
    waves = torch.randn(BATCH, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return {"input_values": waves, "labels": torch.arange(BATCH) % 2}


def spoken() -> Inputs:
    return sound() | {"labels": torch.arange(BATCH * 3).view(BATCH, 3) % 5 + 2}


def spectrum() -> Inputs:
    mels = torch.randn(BATCH, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return {"input_features": mels, "labels": text(6)["labels"]}


def captioned() -> Inputs:
    return {"pixel_values": picture()["pixel_values"], "input_ids": text()["input_ids"]}


class Packed(nn.Module):
    """A decoder with two sequences in each row: positions restart, and attention stays within a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.model = built("Qwen2ForCausalLM")

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1])
        positions = torch.where(places < 7, places, places - 7).expand(input_ids.shape)
        loss: torch.Tensor = self.model(input_ids=input_ids, position_ids=positions, labels=labels).loss
        return loss


class Paired(nn.Module):
    """CLIP with its contrastive loss over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        words = {**parts, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 2}
        config = hf.CLIPConfig(
            text_config=words, vision_config={**parts, "image_size": 16, "patch_size": 4}, projection_dim=16
        )
        self.clip = hf.CLIPModel(config)

    def forward(self, pixel_values: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.clip(pixel_values=pixel_values, input_ids=input_ids, return_loss=True).loss
        return loss


class Listener(nn.Module):
    """HuBERT with the loss of its CTC head; the library's own loss reads values of the labels first."""

    def __init__(self) -> None:
        super().__init__()
        self.model = built("HubertForCTC", **_SOUND)

    def forward(self, input_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.model(input_values).logits.log_softmax(-1).transpose(0, 1)
        length = torch.full((labels.shape[0],), scores.shape[0])
        letters = torch.full((labels.shape[0],), labels.shape[1])
        return nn.functional.ctc_loss(scores, labels, length, letters)


class Tagger(nn.Module):
    """Two bidirectional recurrent layers, then one of the other kind."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 32)
        self.lstm = nn.LSTM(32, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(48, 32, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.lstm.flatten_parameters()  # reads the list of weights before the LSTM makes it anew
        hidden, _ = self.gru(self.lstm(self.words(input_ids))[0])
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Translator(nn.Module):
    """torch's own Transformer, with causal and padding masks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 32)
        self.transformer = nn.Transformer(32, 4, 1, 2, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], dtype=torch.float64)
        padding = input_ids == 3
        words = self.words(input_ids)
        hidden = self.transformer(words, words.flip(1), tgt_mask=causal, src_key_padding_mask=padding)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def made(kind: type[nn.Module], inputs: Callable[[], Inputs]) -> Make:
    def make() -> tuple[nn.Module, Inputs]:
        torch.manual_seed(0)
        return kind().double(), inputs()

    return make


_SOUND: dict[str, Any] = dict(conv_dim=[16, 16], conv_stride=[5, 4], conv_kernel=[10, 8], num_feat_extract_layers=2)
_SOUND |= dict(num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, mask_time_prob=0.0, pad_token_id=0)
_WHISPER: dict[str, Any] = dict(num_mel_bins=8, max_source_positions=8, max_target_positions=16)
_GIT_VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4
)
_SWIN: dict[str, Any] = dict(embed_dim=8, depths=[1, 1], num_heads=[2, 4], window_size=2, patch_size=2)
_RESNET: dict[str, Any] = dict(embedding_size=8, hidden_sizes=[16, 16], depths=[1, 1], layer_type="basic")
MODELS: dict[str, Make] = {
    # decoders
    "gpt2": case("GPT2LMHeadModel"),
    "gpt_neo": case("GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], window_size=4),
    "gpt_neox": case("GPTNeoXForCausalLM"),
    # all features rotate, so that the slice of the others is empty
    "gpt_neox_japanese": case("GPTNeoXJapaneseForCausalLM"),
    "gptj": case("GPTJForCausalLM", rotary_dim=4),
    "bloom": case("BloomForCausalLM"),
    "opt": case("OPTForCausalLM"),
    "falcon": case("FalconForCausalLM"),
    "mpt": case("MptForCausalLM"),
    "llama": case("LlamaForCausalLM"),
    "qwen3": case("Qwen3ForCausalLM"),
    "gemma2": case("Gemma2ForCausalLM", sliding_window=4),
    "phi3": case("Phi3ForCausalLM", pad_token_id=0),
    "cohere": case("CohereForCausalLM"),
    "olmo2": case("Olmo2ForCausalLM"),
    "packed": made(Packed, text),
    "stablelm": case("StableLmForCausalLM"),
    # mixtures of experts
    "mixtral": case("MixtralForCausalLM"),
    "qwen3_moe": case("Qwen3MoeForCausalLM"),
    "deepseek_v3": case("DeepseekV3ForCausalLM"),
    "gpt_oss": case("GptOssForCausalLM"),
    # encoders
    "bert": case("BertForMaskedLM"),
    "roberta": case("RobertaForSequenceClassification", classes),
    "albert": case("AlbertForMaskedLM"),
    "electra": case("ElectraForMaskedLM"),
    "deberta_v2": case("DebertaV2ForMaskedLM"),
    "distilbert": case("DistilBertForSequenceClassification", classes),
    "modernbert": case("ModernBertForMaskedLM"),
    "fnet": case("FNetForMaskedLM"),
    # encoder-decoders
    "t5": case("T5ForConditionalGeneration", decoder_start_token_id=1),
    "bart": case("BartForConditionalGeneration", translation),
    "pegasus": case("PegasusForConditionalGeneration", translation),
    "nn_transformer": made(Translator, text),
    # vision
    "vit": case("ViTForImageClassification", picture),
    "beit": case("BeitForImageClassification", picture),
    "deit": case("DeiTForImageClassification", picture),
    "swin": case("SwinForImageClassification", picture, **_SWIN),
    "convnext": case("ConvNextForImageClassification", large_picture, hidden_sizes=[8, 16, 16, 16], depths=[1] * 4),
    "resnet": case("ResNetForImageClassification", large_picture, **_RESNET),
    # speech
    "wav2vec2": case("Wav2Vec2ForSequenceClassification", sound, **_SOUND),
    "hubert": made(Listener, spoken),
    "whisper": case("WhisperForConditionalGeneration", spectrum, **_WHISPER),
    # vision and language
    "clip": made(Paired, captioned),
    "git": case("GitForCausalLM", lambda: captioned() | text(), vision_config=_GIT_VISION),
    # state-space and recurrent
    "mamba": case("MambaForCausalLM", state_size=4, time_step_rank=4),
    "mamba2": case("Mamba2ForCausalLM", state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
    "lstm": made(Tagger, text),
    "rwkv": case("RwkvForCausalLM", attention_hidden_size=32, context_length=32),
}
