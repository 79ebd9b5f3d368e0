"""Llama, Mistral, Qwen2 (biases) and Qwen3 (norms of queries and keys)."""

from attnlab.pretrained.language import COMMON, LanguageModel

OPTIONS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "max_position_embeddings rms_norm_eps rope_parameters attention_bias attention_dropout mlp_bias pretraining_tp "
    "sliding_window use_sliding_window max_window_layers layer_types"
)


class Llama(LanguageModel):
    """Separate projections, grouped keys and values, a gated MLP; the head width is the config's, not d / h.

    down(act(gate(x)) * up(x)). Rotary positions, and Qwen3's norms, act on q and k after the projections.
    """

    name = "llama"
    classes = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
    blocks = "model.layers"
    attention = "self_attn"
    places = {name: f"self_attn.{name}_proj" for name in "qkvo"} | {
        name: f"mlp.{name}_proj" for name in ("gate", "up", "down")
    }
    options = COMMON | frozenset(OPTIONS.split())
    known = {"meta-llama/Llama-2-7b-hf": {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}}
