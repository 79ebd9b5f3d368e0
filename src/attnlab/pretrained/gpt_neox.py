"""GPT-NeoX and Pythia."""

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
    attention = "attention"
    places = {
        **dict.fromkeys("qkv", "attention.query_key_value"),
        "o": "attention.dense",
        "fc_in": "mlp.dense_h_to_4h",
        "fc_out": "mlp.dense_4h_to_h",
    }
    missing = "attention and MLP side by side, and heads of which a part is rotated"
    options = COMMON | frozenset(OPTIONS.split())

    def rows(self, part: int, heads: int, width: int) -> tuple[int, ...]:
        return tuple((3 * head + part) * width + row for head in range(heads) for row in range(width))
