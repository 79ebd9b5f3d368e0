"""Phi-3 and Phi-4."""

from dataclasses import replace
from typing import Any

from attnlab.pretrained.base import Layer
from attnlab.pretrained.llama import Llama


class Phi3(Llama):
    """Llama's layers with two fused modules, consecutive rows q | k | v and gate | up."""

    name = "phi3"
    classes = {"phi3": "Phi3ForCausalLM"}
    places = {
        **dict.fromkeys("qkv", "self_attn.qkv_proj"),
        "o": "self_attn.o_proj",
        **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
        "down": "mlp.down_proj",
    }
    options = Llama.options | {"resid_pdrop", "embd_pdrop", "original_max_position_embeddings"}
    known = {}

    def layer(self, config: Any, path: str, index: int) -> Layer:
        layer, ends, projections = super().layer(config, path, index), dict[str, int](), {}
        for name, place in layer.projections.items():
            start = ends.get(place.path, 0)
            ends[place.path] = end = start + place.shape[0]
            projections[name] = place if name in ("o", "down") else replace(place, rows=range(start, end))
        return replace(layer, projections=projections)
