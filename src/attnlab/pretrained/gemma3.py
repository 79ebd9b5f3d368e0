"""Gemma 3, its text models."""

from dataclasses import replace
from typing import Any

from attnlab.pretrained.base import Layer
from attnlab.pretrained.llama import Llama

OPTIONS = (
    "hidden_activation query_pre_attn_scalar final_logit_softcapping attn_logit_softcapping use_bidirectional_attention"
)


class Gemma3(Llama):
    """Llama's projections; norms before and after attention and MLP, of queries and keys, and windows."""

    name = "gemma3"
    classes = {"gemma3_text": "Gemma3ForCausalLM"}
    between = "norms and rotates queries and keys"
    missing = "norms after attention and MLP, and embeddings that are scaled"
    fixed = {"is_causal": True, "use_bidirectional_attention": False}
    options = Llama.options - {"hidden_act"} | frozenset(OPTIONS.split())
    known = {}

    def layer(self, config: Any, path: str, index: int) -> Layer:
        return replace(super().layer(config, path, index), scale=config.query_pre_attn_scalar**-0.5)
