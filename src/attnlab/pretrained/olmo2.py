"""OLMo 2."""

from attnlab.pretrained.llama import Llama


class Olmo2(Llama):
    """Llama's projections; norms after attention and MLP, and of the queries and the keys of all heads together."""

    name = "olmo2"
    classes = {"olmo2": "Olmo2ForCausalLM"}
    between = "norms and rotates queries and keys"
    missing = "norms after attention and MLP, and norms of the queries and keys of all heads together"
    known = {}
