"""Tiny decoders of transformers with random weights, and the same models as attnlab's decoders."""

from functools import cache
from typing import Any

import torch
from torch import nn

from attnlab.models import Decoder
from attnlab.pretrained import decoder, huggingface

VOCABULARY = 96
IDS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = IDS | HEADS | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
PAD = {"pad_token_id": 2}
GPT2 = IDS | {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
}  # fmt: skip
SMOLLM = {
    "hidden_size": 36, "head_dim": 12, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "llama3": {"model_type": "llama", **SIZES, "rope_parameters": LLAMA3},
    "llama-biased": {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
    "smollm": {"model_type": "llama", **SIZES, **SMOLLM},
    "yarn": {"model_type": "llama", **SIZES, "rope_parameters": YARN},
    "linear": {"model_type": "llama", **SIZES, "rope_parameters": LINEAR},
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": None},
    "mistral-window": {"model_type": "mistral", **SIZES, "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "qwen2-window": {
        "model_type": "qwen2", **SIZES, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 16},
    "gpt2": GPT2,
    "smollm3": {"model_type": "smollm3", **SIZES, "num_hidden_layers": 3, "no_rope_layers": [0, 1, 1], **PAD},
    "phi3": {"model_type": "phi3", **SIZES, **PAD},
}  # fmt: skip


def reference(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of transformers whose biases and norms all count."""
    torch.manual_seed(0)
    model = huggingface.create("tiny", FAMILIES[name])
    for parameter in model.parameters():
        wide = parameter.dim() > 1
        nn.init.normal_(parameter, mean=0.0 if wide else 0.5, std=0.15 if wide else 0.3)
    return model.to(dtype).eval()


def decoder_of(model: nn.Module) -> Decoder:
    """attnlab's decoder with the weights of a model of transformers."""
    return decoder.of(model, "tiny")


@cache
def exact(name: str) -> Decoder:
    """attnlab's decoder in float64, whose rotary tables are float64 too. Do not change it."""
    return decoder_of(reference(name, torch.float64))


def tokens(rows: int, positions: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, positions), generator=torch.Generator().manual_seed(seed))
