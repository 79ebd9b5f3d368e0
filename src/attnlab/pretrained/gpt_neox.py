"""GPT-NeoX and Pythia."""

from __future__ import annotations

from typing import Any

from attnlab.pretrained.base import Layer, Projection
from attnlab.pretrained.language import COMMON, LanguageModel

OPTIONS = (
    "hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act attention_dropout "
    "hidden_dropout max_position_embeddings layer_norm_eps use_parallel_residual rope_parameters "
    "attention_bias"
)


class GPTNeoX(LanguageModel):
    """One module for q, k and v, interleaved by head: rows q | k | v of each head."""

    name = "gpt_neox"
    classes = {"gpt_neox": "GPTNeoXForCausalLM"}
    blocks = "gpt_neox.layers"
    options = COMMON | frozenset(OPTIONS.split())

    def layer(self, config: Any, path: str, index: int) -> Layer:
        attention, mlp = f"{path}.attention", f"{path}.mlp"
        dim, hidden, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
        width = dim // heads
        projections = {}
        for i, name in enumerate("qkv"):
            rows = tuple((3 * head + i) * width + row for head in range(heads) for row in range(width))
            projections[name] = Projection(f"{attention}.query_key_value", (dim, dim), "out", heads, rows)
        projections["o"] = Projection(f"{attention}.dense", (dim, dim), "in", heads)
        projections["fc_in"] = Projection(f"{mlp}.dense_h_to_4h", (hidden, dim))
        projections["fc_out"] = Projection(f"{mlp}.dense_4h_to_h", (dim, hidden))
        dropout = (config.attention_dropout, config.hidden_dropout)
        return Layer(path, attention, mlp, projections, width**-0.5, dropout)
