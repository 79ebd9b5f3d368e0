"""Export of a decoder with multi-head latent attention as a DeepseekV3: a folder without code of attnlab.

Two forms. A model with RMS norms of latents, no biases and a standard rotary spectrum is what DeepSeek computes, and
every engine runs it by its own class (the *native* form). A model converted without norms is represented by a constant
channel of size M, which makes DeepSeek's norms of latents constant: the root mean square of [c, M] is M / sqrt(r + 1)
up to a relative error of |c|^2 / 2 M^2, and the norm's weight cancels it (the *exact* form). It has biases, and any
rotary frequencies. The class of transformers computes both. The own classes of vLLM and others drop the biases, so the
config of an exact form names vLLM's backend for classes of transformers as its architecture: vLLM then takes it by any
`--model-impl`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnlab.attention import MLA, MLAWindow
from attnlab.attention.mla import MLAQueryLatent
from attnlab.conversion.statistics import frequencies_of
from attnlab.errors import ConfigError
from attnlab.export.weights import check_logits
from attnlab.models.decoder import ACTIVATIONS, Decoder
from attnlab.models.language_model import LanguageModel
from attnlab.pretrained import hub

CONSTANT = 1e4  # M; the largest number of float16 is 6.5e4
THETA = 10000.0
NEAR = {torch.float32: 1e-3, torch.float64: 1e-5}  # of logits, in units of the largest; other types: below
BY_TRANSFORMERS = "TransformersForCausalLM"  # vLLM's backend, as the architecture of exact forms


class Exported(NamedTuple):
    """A `DeepseekV3ForCausalLM` of transformers, and its form."""

    model: Any
    form: Literal["native", "exact"]


def refusal(model: LanguageModel) -> str | None:
    """The reason why DeepseekV3 cannot represent a model, or None."""
    if not isinstance(model, Decoder):
        return f"{type(model).__name__} has other blocks than DeepseekV3"
    block, attentions = model.blocks[0], model.attentions
    if any(isinstance(attention, MLAWindow) for attention in attentions):
        return "DeepseekV3 has no sliding windows, and some layers have one"
    if kinds := sorted({type(a).__name__ for a in attentions if type(a) not in (MLA, MLAQueryLatent)}):
        return f"DeepseekV3 has no {', '.join(kinds)}; it holds attention=mla, mla_t6 and convert=mla"
    mla = [attention for attention in attentions if isinstance(attention, MLA)]
    if block.gate is None or not isinstance(block.mlp_norm, nn.RMSNorm) or block.up.bias is not None:
        return "DeepseekV3 has gated MLPs without biases, and RMS norms"
    if not isinstance(mla[0].down, nn.Linear):
        return "norms of queries and keys (Qwen3) stand before the projection of latents, which DeepseekV3 cannot do"
    if any(isinstance(a.norm, nn.LayerNorm) for a in mla):
        return "DeepseekV3 has RMS norms of latents; train with +attention.norm=rms"
    first = mla[0]
    if any(isinstance(a.norm, nn.RMSNorm) and (a.down.bias is not None or getattr(a.query, "bias", None) is not None)
           for a in mla):  # fmt: skip
        return "DeepseekV3 has no biases of latents that have norms"
    if first.rope_dim == 0:
        return "DeepseekV3 has no attention without rotary keys; convert with convert.rope_dim=2 or more"
    for a in mla:
        if (a.rope_dim, a.latent_dim, type(a.norm)) != (first.rope_dim, first.latent_dim, type(first.norm)):
            return "DeepseekV3 has one rope_dim and one latent_dim for all layers; convert with convert.layers=same"
        if not torch.equal(frequencies_of(a), frequencies_of(first)):
            return "DeepseekV3 has equal rotary frequencies in all layers; convert with convert.layers=same"
    return None


@torch.no_grad()
def convert(model: LanguageModel) -> Exported:
    """Convert a model to an equivalent `DeepseekV3ForCausalLM`.

    Raises:
        ConfigError: DeepseekV3 cannot represent the model.
        DataError: the logits differ by more than the error of the constant channel.
    """
    library = hub.transformers()
    if reason := refusal(model):
        raise ConfigError(f"format=vllm: {reason}")
    assert isinstance(model, Decoder)
    mla = [attention for attention in model.attentions if isinstance(attention, MLA)]
    base, normed = _base(frequencies_of(mla[0])), isinstance(mla[0].norm, nn.RMSNorm)
    native = normed and base is not None and all(a.out.bias is None for a in mla)
    config, dtype = _config(library, model, mla, base, native), model.embedding.weight.dtype
    converted = library.DeepseekV3ForCausalLM(config).to(dtype).eval()
    state: dict[str, Any] = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": _weight(model.norm, mla[0].d_model),
        "lm_head.weight": model.vocabulary_matrix,
    }
    for i, (block, a) in enumerate(zip(model.blocks, mla, strict=True)):
        layer = f"model.layers.{i}"
        state[f"{layer}.input_layernorm.weight"] = _weight(block.attention_norm, a.d_model)
        state[f"{layer}.post_attention_layernorm.weight"] = _weight(block.mlp_norm, a.d_model)
        for name in ("gate", "up", "down"):
            state[f"{layer}.mlp.{name}_proj.weight"] = getattr(block, name).weight
        weights = _normed(a, native) if normed else _constant(a, config.q_lora_rank is not None)
        if not native:
            weights["o_proj.bias"] = a.out.weight.new_zeros(a.d_model) if a.out.bias is None else a.out.bias
            if normed:
                weights |= _zero_biases(weights)
        state |= {f"{layer}.self_attn.{name}": value for name, value in weights.items()}
    converted.load_state_dict({name: value.to(dtype).clone() for name, value in state.items()})
    converted.tie_weights()
    check_logits(model, converted, NEAR.get(dtype, 0.05))
    return Exported(converted, "native" if native else "exact")


def _base(frequencies: Tensor) -> float | None:
    """theta if the frequencies are theta^(-2 i / d_r), as of a standard head of width d_r; else None."""
    size = 2 * len(frequencies)
    theta = THETA if size == 2 else float(frequencies[0] / frequencies[1]) ** (size / 2)
    standard = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    return theta if torch.allclose(standard, frequencies.double(), rtol=1e-5, atol=0) else None


def _weight(norm: nn.Module, width: int) -> Tensor:
    assert isinstance(norm, nn.RMSNorm)
    return torch.ones(width) if norm.weight is None else norm.weight


def _config(library: Any, model: Decoder, mla: list[MLA], base: float | None, native: bool) -> Any:
    """`base`: of a standard rotary spectrum, or None."""
    first, block = mla[0], model.blocks[0]
    constant = not isinstance(first.norm, nn.RMSNorm)
    activation = next(name for name, function in ACTIVATIONS.items() if function is block.act)
    assert isinstance(model.norm, nn.RMSNorm)
    queries: Any = None  # width of their latent
    if isinstance(first, MLAQueryLatent):
        queries = first.query.get_submodule("0").out_features
    elif constant and any(a.query.bias is not None for a in mla):
        queries = first.d_model + 1
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if base is None:
        standard = THETA ** (-torch.arange(0, first.rope_dim, 2, dtype=torch.float64) / first.rope_dim)
        factors = (standard / frequencies_of(first)).tolist()
        rotary = {
            "rope_type": "longrope",
            "rope_theta": THETA,
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": model.max_length,
        }
    return library.DeepseekV3Config(
        vocab_size=model.embedding.num_embeddings,
        hidden_size=first.d_model,
        intermediate_size=block.down.in_features,
        moe_intermediate_size=block.down.in_features,
        num_hidden_layers=len(mla),
        num_attention_heads=first.num_heads,
        num_key_value_heads=first.num_heads,
        n_routed_experts=2,  # none is built; llama.cpp requires more than n_group
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=len(mla),
        kv_lora_rank=first.latent_dim + constant,
        q_lora_rank=queries,
        qk_rope_head_dim=first.rope_dim,
        qk_nope_head_dim=first.head_dim,
        v_head_dim=first.head_dim,
        hidden_act={"gelu_tanh": "gelu_pytorch_tanh"}.get(activation, activation),
        max_position_embeddings=model.max_length,
        rms_norm_eps=model.norm.eps or torch.finfo(model.embedding.weight.dtype).eps,
        tie_word_embeddings=model.output is None and not native,  # vLLM's own class reads `lm_head` from the file
        rope_interleave=native,
        rope_parameters=rotary,
        attention_bias=not native,
        num_mtp_layers=0,
        bos_token_id=None,
        eos_token_id=None,
    )


def _normed(a: MLA, native: bool) -> dict[str, Tensor]:
    """The weights of a layer with norms by their names in DeepseekV3; `native`: rotary pairs are neighbours."""
    assert isinstance(a.down, nn.Linear)
    pairs = torch.arange(a.rope_dim).view(2, -1).mT.flatten() if native else torch.arange(a.rope_dim)
    rows = torch.cat((torch.arange(a.latent_dim), a.latent_dim + pairs))
    of_head = torch.cat((torch.arange(a.head_dim), a.head_dim + pairs))
    last = a.query[2] if isinstance(a.query, nn.Sequential) else a.query
    assert isinstance(last, nn.Linear)
    query = last.weight.unflatten(0, (a.num_heads, -1))[:, of_head].flatten(0, 1)
    key, value = a.up_matrices()
    weights: dict[str, Tensor] = {
        "kv_a_proj_with_mqa.weight": a.down.weight[rows],
        "kv_a_layernorm.weight": _weight(a.norm, a.latent_dim),
        "kv_b_proj.weight": torch.cat((key, value), 1).flatten(0, 1),
        "o_proj.weight": a.out.weight,
    }
    if not isinstance(a.query, nn.Sequential):
        return weights | {"q_proj.weight": query}
    first = a.query[0]
    assert isinstance(first, nn.Linear)
    inner = {"q_a_proj.weight": first.weight, "q_a_layernorm.weight": _weight(a.query[1], 0)}
    return weights | inner | {"q_b_proj.weight": query}


def _zero_biases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """DeepseekV3 has all of these biases or none."""
    names = [name for name in ("kv_a_proj_with_mqa", "q_a_proj") if f"{name}.weight" in weights]
    return {f"{name}.bias": weights[f"{name}.weight"].new_zeros(len(weights[f"{name}.weight"])) for name in names}


def _constant(a: MLA, wide: bool) -> dict[str, Tensor]:
    """The weights of a layer without norms by their names in DeepseekV3, with a constant channel after the latent.

    Args:
        wide: a constant channel stands after the inputs of queries too, for their bias.
    """
    assert isinstance(a.query, nn.Linear) and isinstance(a.down, nn.Linear)
    width, r, rope = a.d_model, a.latent_dim, a.rope_dim
    down, bias = a.down.weight, a.down.bias
    matrix = down.new_zeros(r + 1 + rope, width)
    matrix[:r], matrix[r + 1 :] = down[:r], down[r:]
    added = down.new_zeros(r + 1 + rope)
    if bias is not None:
        added[:r], added[r + 1 :] = bias[:r], bias[r:]
    added[r] = CONSTANT
    key, value = a.up_matrices()
    up = down.new_zeros(a.num_heads, 2 * a.head_dim, r + 1)
    up[:, : a.head_dim, :r], up[:, a.head_dim :, :r] = key, value
    weights = {
        "kv_a_proj_with_mqa.weight": matrix,
        "kv_a_proj_with_mqa.bias": added,
        "kv_a_layernorm.weight": down.new_full((r + 1,), CONSTANT * (r + 1) ** -0.5),
        "kv_b_proj.weight": up.flatten(0, 1),
        "o_proj.weight": a.out.weight,
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
