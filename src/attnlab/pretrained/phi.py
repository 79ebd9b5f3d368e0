"""Phi 1, 1.5 and 2."""

from attnlab.pretrained.language import COMMON, LanguageModel

OPTIONS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "resid_pdrop embd_pdrop attention_dropout max_position_embeddings layer_norm_eps rope_parameters qk_layernorm"
)


class Phi(LanguageModel):
    """Separate projections with biases; a part of each head is rotated; one norm before both attention and MLP."""

    name = "phi"
    classes = {"phi": "PhiForCausalLM"}
    blocks = "model.layers"
    attention = "self_attn"
    places = {
        **{name: f"self_attn.{name}_proj" for name in "qkv"},
        "o": "self_attn.dense",
        "fc1": "mlp.fc1",
        "fc2": "mlp.fc2",
    }
    missing = "attention and MLP side by side"
    options = COMMON | frozenset(OPTIONS.split())
