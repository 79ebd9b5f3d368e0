"""SmolLM3."""

from collections.abc import Mapping
from typing import Any

from attnlab.pretrained.llama import Llama


class SmolLM3(Llama):
    """Llama's layers, of which some, by default every fourth, do not rotate queries and keys."""

    name = "smollm3"
    classes = {"smollm3": "SmolLM3ForCausalLM"}
    options = Llama.options | {"no_rope_layers", "no_rope_layer_interval"}
    known = {}

    def node(self, options: Mapping[str, Any], index: int) -> dict[str, Any]:
        return {} if options["no_rope_layers"][index] else {"rope_dim": 0}
