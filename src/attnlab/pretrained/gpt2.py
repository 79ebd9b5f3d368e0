"""GPT-2."""

from __future__ import annotations

from typing import Any

from attnlab.pretrained.base import Layer, Projection
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
    options = COMMON | frozenset(OPTIONS.split())

    def layer(self, config: Any, path: str, index: int) -> Layer:
        attention, mlp = f"{path}.attn", f"{path}.mlp"
        dim, heads = config.n_embd, config.n_head
        hidden = config.n_inner or 4 * dim
        projections = {
            name: Projection(
                f"{attention}.c_attn", (dim, dim), "out", heads, range(i * dim, (i + 1) * dim), transposed=True
            )
            for i, name in enumerate("qkv")
        }
        projections["o"] = Projection(f"{attention}.c_proj", (dim, dim), "in", heads, transposed=True)
        projections["fc_in"] = Projection(f"{mlp}.c_fc", (hidden, dim), transposed=True)
        projections["fc_out"] = Projection(f"{mlp}.c_proj", (dim, hidden), transposed=True)
        scale = (dim // heads) ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= index + 1
        return Layer(path, attention, mlp, projections, scale, (config.attn_pdrop, config.resid_pdrop))
