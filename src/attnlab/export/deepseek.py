"""Export of a converted decoder as transformers' DeepseekV3: a folder without code of attnlab.

The class of transformers caches latents and rotary keys, as attnlab does, but builds keys and values of all positions
again in every step. A constant channel of size M makes its norms of latents constant: the root mean square of [c, M] is
M / sqrt(r + 1) up to a relative error of |c|^2 / 2 M^2, and the norm's weight cancels it. Other programs have other
classes for this architecture, with other results: see SERVING.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnlab.attention import MLA, MLAWindow
from attnlab.errors import ConfigError
from attnlab.export.weights import check_logits
from attnlab.models.decoder import ACTIVATIONS, Decoder
from attnlab.models.language_model import LanguageModel
from attnlab.pretrained import hub

CONSTANT = 1e4  # M; the largest number of float16 is 6.5e4
THETA = 10000.0
NEAR = {torch.float32: 1e-3, torch.float64: 1e-5}  # of logits, in units of the largest; other types: below
SERVING = (  # for the model card and the end of the export
    "Serve it with `vllm serve {folder} --model-impl transformers`: vLLM's default decodes it wrongly and reports no "
    "error. `--model-impl auto`, the default, and `--model-impl vllm` use vLLM's own class for DeepseekV3, which drops "
    "the bias that carries the constant channel, rotates interleaved pairs, and rewrites longrope. Measured "
    "with vLLM 0.32 (latent_dim 511, rope_dim 64, 3 layers) against this model: `auto` and `vllm` give 0 of 24 greedy "
    "tokens and log-probabilities off by 4.5, `transformers` gives 24 of 24 and 2e-5."
)


def refusal(model: LanguageModel) -> str | None:
    """The reason why DeepseekV3 cannot represent a model, or None."""
    if type(model) is not Decoder:
        return f"{type(model).__name__} is no converted decoder"
    block, attentions = model.blocks[0], model.attentions
    if any(isinstance(attention, MLAWindow) for attention in attentions):
        return "DeepseekV3 has no sliding windows, and some layers have one; use format=hf"
    if kinds := sorted({type(attention).__name__ for attention in attentions if type(attention) is not MLA}):
        return f"DeepseekV3 has no {', '.join(kinds)}; it holds convert=mla"
    mla = [attention for attention in attentions if isinstance(attention, MLA)]
    if block.gate is None or not isinstance(block.mlp_norm, nn.RMSNorm) or block.up.bias is not None:
        return "DeepseekV3 has gated MLPs without biases, and RMS norms"
    if any(not isinstance(a.query, nn.Linear) or not isinstance(a.down, nn.Linear) for a in mla):
        return "norms of queries and keys (Qwen3) stand before the projection of latents, which DeepseekV3 cannot do"
    if any(not isinstance(a.norm, nn.Identity) for a in mla):
        return "its latents have norms already; it was not converted"
    first = mla[0]
    if first.rope_dim == 0:
        return "DeepseekV3 has no attention without rotary keys; convert with convert.rope_dim=2 or more"
    for a in mla:
        if (a.rope_dim, a.latent_dim) != (first.rope_dim, first.latent_dim):
            return "DeepseekV3 has one rope_dim and one latent_dim for all layers; convert with convert.layers=same"
        if not torch.equal(a.frequencies, first.frequencies):
            return "DeepseekV3 has equal rotary frequencies in all layers; convert with convert.layers=same"
    return None


@torch.no_grad()
def convert(model: LanguageModel) -> Any:
    """Convert a model to an equivalent `DeepseekV3ForCausalLM`.

    Raises:
        ConfigError: DeepseekV3 cannot represent the model.
        DataError: the logits differ by more than the error of the constant channel.
    """
    library = hub.transformers()
    if reason := refusal(model):
        raise ConfigError(f"format=deepseek: {reason}")
    assert isinstance(model, Decoder)
    mla = [attention for attention in model.attentions if isinstance(attention, MLA)]
    config, rank = _config(library, model, mla), max(a.latent_dim for a in mla)
    dtype = model.embedding.weight.dtype
    converted = library.DeepseekV3ForCausalLM(config).to(dtype).eval()
    wide = config.q_lora_rank is not None
    state: dict[str, Any] = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.vocabulary_matrix,
    }
    for i, (block, a) in enumerate(zip(model.blocks, mla, strict=True)):
        layer = f"model.layers.{i}"
        state[f"{layer}.input_layernorm.weight"] = block.attention_norm.weight
        state[f"{layer}.post_attention_layernorm.weight"] = block.mlp_norm.weight
        for name in ("gate", "up", "down"):
            state[f"{layer}.mlp.{name}_proj.weight"] = getattr(block, name).weight
        weights = _attention(a, rank, wide)
        state |= {f"{layer}.self_attn.{name}": value for name, value in weights.items()}
    converted.load_state_dict({name: value.clone() for name, value in state.items()})
    converted.tie_weights()
    check_logits(model, converted, NEAR.get(dtype, 0.05))
    return converted


def _config(library: Any, model: Decoder, mla: list[MLA]) -> Any:
    first, block = mla[0], model.blocks[0]
    biased = any(a.query.bias is not None for a in mla)
    standard = THETA ** (-torch.arange(0, first.rope_dim, 2, dtype=torch.float64) / first.rope_dim)
    factors = (standard / first.frequencies).tolist()
    activation = next(name for name, function in ACTIVATIONS.items() if function is block.act)
    assert isinstance(model.norm, nn.RMSNorm)
    return library.DeepseekV3Config(
        vocab_size=model.embedding.num_embeddings,
        hidden_size=first.d_model,
        intermediate_size=block.down.in_features,
        moe_intermediate_size=block.down.in_features,
        num_hidden_layers=len(mla),
        num_attention_heads=first.num_heads,
        num_key_value_heads=first.num_heads,
        n_routed_experts=1,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=len(mla),
        kv_lora_rank=max(a.latent_dim for a in mla) + 1,
        q_lora_rank=first.d_model + 1 if biased else None,
        qk_rope_head_dim=first.rope_dim,
        qk_nope_head_dim=first.head_dim,
        v_head_dim=first.head_dim,
        hidden_act={"gelu_tanh": "gelu_pytorch_tanh"}.get(activation, activation),
        max_position_embeddings=model.max_length,
        rms_norm_eps=model.norm.eps,
        tie_word_embeddings=model.output is None,
        rope_interleave=False,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": THETA,
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": model.max_length,
        },
        attention_bias=True,
        attention_dropout=0.0,
        num_mtp_layers=0,
    )


def _attention(a: MLA, rank: int, wide: bool) -> dict[str, Tensor]:
    """The weights of one layer by their names in DeepseekV3, with a constant channel after the latent."""
    assert isinstance(a.query, nn.Linear) and isinstance(a.down, nn.Linear)
    width, r, rope = a.d_model, a.latent_dim, a.rope_dim
    down, bias = a.down.weight, a.down.bias
    matrix = down.new_zeros(rank + 1 + rope, width)
    matrix[:r], matrix[rank + 1 :] = down[:r], down[r:]
    added = down.new_zeros(rank + 1 + rope)
    if bias is not None:
        added[:r], added[rank + 1 :] = bias[:r], bias[r:]
    added[rank] = CONSTANT
    key, value = a.up_matrices()
    up = down.new_zeros(a.num_heads, 2 * a.head_dim, rank + 1)
    up[:, : a.head_dim, :r], up[:, a.head_dim :, :r] = key, value
    weights = {
        "kv_a_proj_with_mqa.weight": matrix,
        "kv_a_proj_with_mqa.bias": added,
        "kv_a_layernorm.weight": down.new_full((rank + 1,), CONSTANT * (rank + 1) ** -0.5),
        "kv_b_proj.weight": up.flatten(0, 1),
        "o_proj.weight": a.out.weight,
        "o_proj.bias": down.new_zeros(width) if a.out.bias is None else a.out.bias,
    }
    if not wide:
        return weights | {"q_proj.weight": a.query.weight}
    inner = down.new_zeros(width + 1, width)
    inner[:width] = torch.eye(width, dtype=down.dtype)
    constant = down.new_zeros(width + 1)
    constant[width] = CONSTANT
    zero = torch.zeros_like(a.query.weight[:, 0])
    of_bias = (zero if a.query.bias is None else a.query.bias) / CONSTANT
    return weights | {
        "q_a_proj.weight": inner,
        "q_a_proj.bias": constant,
        "q_a_layernorm.weight": down.new_full((width + 1,), CONSTANT * (width + 1) ** -0.5),
        "q_b_proj.weight": torch.cat((a.query.weight, of_bias[:, None]), 1),
    }
