"""GPT-J."""

from __future__ import annotations

from typing import Any

from attnlab.pretrained.base import Layer, Projection
from attnlab.pretrained.language import COMMON, LanguageModel

OPTIONS = (
    "n_positions n_embd n_layer n_head n_inner rotary_dim activation_function resid_pdrop embd_pdrop attn_pdrop "
    "layer_norm_epsilon"
)


class GPTJ(LanguageModel):
    """Separate projections without biases, rotary positions after them; an MLP of two matrices with biases."""

    name = "gptj"
    classes = {"gptj": "GPTJForCausalLM"}
    blocks = "transformer.h"
    options = COMMON | frozenset(OPTIONS.split())
    known = {"EleutherAI/gpt-j-6b": {"model_type": "gptj"}}

    def layer(self, config: Any, path: str, index: int) -> Layer:
        attention, mlp = f"{path}.attn", f"{path}.mlp"
        dim, heads = config.n_embd, config.n_head
        hidden = config.n_inner or 4 * dim
        projections = {
            name: Projection(f"{attention}.{name}_proj", (dim, dim), "out", heads) for name in ("q", "k", "v")
        }
        projections["o"] = Projection(f"{attention}.out_proj", (dim, dim), "in", heads)
        projections["fc_in"] = Projection(f"{mlp}.fc_in", (hidden, dim))
        projections["fc_out"] = Projection(f"{mlp}.fc_out", (dim, hidden))
        dropout = (config.attn_pdrop, config.resid_pdrop)
        return Layer(path, attention, mlp, projections, (dim // heads) ** -0.5, dropout)
