"""GPT-2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attnlab.pretrained.base import Layer
from attnlab.pretrained.language import COMMON, LanguageModel

OPTIONS = (
    "n_positions n_embd n_layer n_head n_inner activation_function resid_pdrop embd_pdrop attn_pdrop "
    "layer_norm_epsilon scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn"
)


class GPT2(LanguageModel):
    """One module for q, k and v, rows q | k | v, each by head; weights stored as (in, out) (transformers' Conv1D)."""

    name = "gpt2"
    classes = {"gpt2": "GPT2LMHeadModel"}
    blocks = "transformer.h"
    attention = "attn"
    places = dict.fromkeys("qkv", "attn.c_attn") | {"o": "attn.c_proj", "fc_in": "mlp.c_fc", "fc_out": "mlp.c_proj"}
    between = None
    transposed = True
    options = COMMON | frozenset(OPTIONS.split())

    def rows(self, part: int, heads: int, width: int) -> range:
        return range(part * heads * width, (part + 1) * heads * width)

    def layer(self, config: Any, path: str, index: int) -> Layer:
        layer = replace(super().layer(config, path, index), dropout=(config.attn_pdrop, config.resid_pdrop))
        scale = layer.scale if config.scale_attn_weights else 1.0
        return replace(layer, scale=scale / (index + 1) if config.scale_attn_by_inverse_layer_idx else scale)
