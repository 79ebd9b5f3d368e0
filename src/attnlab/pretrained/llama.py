"""Llama, Mistral, Qwen2 (biases) and Qwen3 (norms of queries and keys)."""

from __future__ import annotations

from typing import Any

from attnlab.pretrained.base import Layer, Projection
from attnlab.pretrained.language import COMMON, LanguageModel

OPTIONS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "max_position_embeddings rms_norm_eps rope_parameters attention_bias attention_dropout mlp_bias pretraining_tp "
    "sliding_window use_sliding_window max_window_layers layer_types"
)


class Llama(LanguageModel):
    """Separate projections, grouped keys and values, a gated MLP; the head width is the config's, not d / h.

    down(act(gate(x)) * up(x)). Rotary positions, and Qwen3's norms, act on q and k after the projections.
    """

    name = "llama"
    classes = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
    blocks = "model.layers"
    options = COMMON | frozenset(OPTIONS.split())
    known = {"meta-llama/Llama-2-7b-hf": {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}}

    def layer(self, config: Any, path: str, index: int) -> Layer:
        attention, mlp = f"{path}.self_attn", f"{path}.mlp"
        dim, hidden, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
        width = getattr(config, "head_dim", None) or dim // heads
        grouped = config.num_key_value_heads or heads
        projections = {
            name: Projection(f"{attention}.{name}_proj", (count * width, dim), "out", count)
            for name, count in (("q", heads), ("k", grouped), ("v", grouped))
        }
        projections["o"] = Projection(f"{attention}.o_proj", (dim, heads * width), "in", heads)
        for name in ("gate", "up"):
            projections[name] = Projection(f"{mlp}.{name}_proj", (hidden, dim))
        projections["down"] = Projection(f"{mlp}.down_proj", (dim, hidden))
        return Layer(path, attention, mlp, projections, width**-0.5, (config.attention_dropout or 0.0, 0.0))
