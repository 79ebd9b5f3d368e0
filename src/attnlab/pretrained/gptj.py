"""GPT-J."""

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
    attention = "attn"
    places = {
        **{name: f"attn.{name}_proj" for name in "qkv"},
        "o": "attn.out_proj",
        "fc_in": "mlp.fc_in",
        "fc_out": "mlp.fc_out",
    }
    missing = "attention and MLP side by side"
    options = COMMON | frozenset(OPTIONS.split())
    known = {"EleutherAI/gpt-j-6b": {"model_type": "gptj"}}
