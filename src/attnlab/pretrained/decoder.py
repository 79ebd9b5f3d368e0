"""Decoders of transformers as attnlab's: configuration and weights in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from attnlab.attention import MHA, Attention
from attnlab.config.build import instantiate
from attnlab.errors import ConfigError, DataError
from attnlab.models.decoder import Decoder
from attnlab.pretrained import family_of, huggingface
from attnlab.pretrained.base import ATTENTION

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
STATIC = ("default", "linear", "llama3", "yarn")  # rotary tables that do not change with the text's length
SAMPLE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 257,  # bytes and the mark between texts
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
LINEARS = dict(zip(ATTENTION, ("query", "key", "value", "out"), strict=True))
LLAMA = {  # names of options
    "width": "hidden_size", "heads": "num_attention_heads", "layers": "num_hidden_layers", "ffn": "intermediate_size",
    "length": "max_position_embeddings", "eps": "rms_norm_eps", "activation": "hidden_act",
    "dropout": "attention_dropout",
}  # fmt: skip
GPT2 = {
    "width": "n_embd", "heads": "n_head", "layers": "n_layer", "ffn": "n_inner", "length": "n_positions",
    "eps": "layer_norm_epsilon", "activation": "activation_function", "dropout": "attn_pdrop",
}  # fmt: skip


def kinds() -> list[str]:
    """The values of `model_type` whose layers attnlab's decoder has."""
    return [kind for kind, family in huggingface.language_families().items() if family.missing is None]


def nodes_of(options: Mapping[str, Any], source: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The nodes `task.model` and, for each layer, `attention`, of a model of transformers.

    Args:
        options: its config, from :func:`attnlab.pretrained.huggingface.config_of`.

    Raises:
        ConfigError: a part of the model is not supported.
    """
    kind = options["model_type"]
    family = huggingface.family_for(kind, source)
    if family.missing:
        raise ConfigError(
            f"model={source}: {kind} has {family.missing}, which attnlab's decoder does not have; it reads "
            f"{', '.join(kinds())}"
        )
    gpt2 = kind == "gpt2"
    names = GPT2 if gpt2 else LLAMA
    for key, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if options.get(key, usual) is not usual:
            raise ConfigError(f"model={source}: {key}={options[key]} is not supported")
    width, heads, eps = options[names["width"]], options[names["heads"]], options[names["eps"]]
    activation = options[names["activation"]]
    if activation not in ACTIVATIONS:
        raise ConfigError(f"model={source}: the activation {activation} is not one of {', '.join(ACTIVATIONS)}")
    length = options[names["length"]]
    model = {
        "_target_": "attnlab.models.Decoder",
        "d_model": width,
        "num_layers": options[names["layers"]],
        "ffn_dim": options.get(names["ffn"]) or 4 * width,
        "max_length": length,
        "norm": "layer" if gpt2 else "rms",
        "norm_eps": eps,
        "activation": ACTIVATIONS[activation],
        "gated": not gpt2,
        "mlp_bias": gpt2 or bool(options.get("mlp_bias")),
        "tied": bool(options.get("tie_word_embeddings", True)),
        "positions": length if gpt2 else 0,
        "dropout": float(options.get("resid_pdrop") or 0.0),
    }
    bias: bool | list[str] = gpt2
    if kind == "qwen2" or options.get("attention_bias"):
        bias = ["query", "key", "value"] if kind == "qwen2" else ["query", "key", "value", "out"]
    attention = {
        "_target_": "attnlab.attention.MHA",
        "d_model": width,
        "num_heads": heads,
        "num_kv_heads": options.get("num_key_value_heads") or heads,
        "head_dim": options.get("head_dim") or width // heads,
        "bias": bias,
        "qk_norm": kind == "qwen3",
        "dropout": float(options.get(names["dropout"]) or 0.0),
        **_rotary(options, source),
        "rope_dim": 0 if gpt2 else None,
        "norm_eps": eps,
    }
    layers = [attention | family.node(options, i) for i in range(options[names["layers"]])]
    return model, [
        layer if window is None else layer | {"_target_": "attnlab.attention.SlidingWindow", "window": window}
        for layer, window in zip(layers, _windows(options, len(layers)), strict=True)
    ]


def _rotary(options: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`; a theta of None: the frequencies are those of the model."""
    rotary = options.get("rope_parameters") or {}
    kind = rotary.get("rope_type", "default")
    if kind not in STATIC:
        raise ConfigError(
            f"model={source}: rope_type {kind} changes its frequencies with the length of the text, which a cache of "
            f"rotated keys cannot follow; expected one of {', '.join(STATIC)}"
        )
    if rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"model={source}: partial_rotary_factor is not supported")
    theta = float(rotary.get("rope_theta", 10000.0))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind != "llama3":
        return {"rope_theta": None, "rope_scaling": None}
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaling = {"_target_": "attnlab.attention.Llama3Scaling"} | {name: rotary[name] for name in names}
    return {"rope_theta": theta, "rope_scaling": scaling}


def _windows(options: Mapping[str, Any], count: int) -> list[int | None]:
    """The sliding window of each layer, or None."""
    window, kinds = options.get("sliding_window"), options.get("layer_types")
    if not options.get("use_sliding_window", True):
        window = None
    if window is None or not kinds:
        return [window] * count
    return [window if kind == "sliding_attention" else None for kind in kinds]


def of(original: nn.Module, source: str) -> Decoder:
    """A model of transformers as attnlab's decoder, in eval mode. ConfigError: as for :func:`nodes_of`."""
    options = huggingface.options_of(original)
    model, layers = nodes_of(options, source)
    nodes = [OmegaConf.create(layer) for layer in layers]
    decoder: Decoder = instantiate(
        OmegaConf.create(model),
        path="task.model",
        vocab_size=options["vocab_size"],
        attention=lambda layer: instantiate(nodes[layer], path="attention"),
    )
    fill(decoder.to(next(original.parameters()).dtype), original)
    return decoder.eval()


@torch.no_grad()
def fill(decoder: Decoder, original: nn.Module) -> None:
    """Copy the weights of a model of transformers into the decoder of :func:`nodes_of`.

    DataError: a parameter of one has no place in the other.
    """
    copied = list(pairs(decoder, original))
    for name, weight in original.named_parameters():
        start, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
        count = sum(value.numel() for _, value in copied if start <= value.data_ptr() < end)  # views of the weight
        if count != weight.numel():
            raise DataError(f"{name}: {count} of its {weight.numel()} values have a place in attnlab's decoder")
    for target, value in copied:
        if target.shape != value.shape:
            raise DataError(f"{tuple(value.shape)} values of the model for a parameter of shape {tuple(target.shape)}")
        target.copy_(value)
    table = _table(original)
    for attention in decoder.attentions:
        assert isinstance(attention, MHA)
        if attention.rope_theta is None and attention.turned and table is not None:
            attention.frequencies = table.inv_freq.to(attention.frequencies)
            scale = float(table.attention_scaling)  # of cos and sin, in queries and keys
            for parameter in scaled(attention):
                parameter.mul_(scale)


def pairs(decoder: Decoder, original: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter of a decoder with its values in a model of transformers."""
    config: Any = original.config
    gpt2 = config.model_type == "gpt2"
    at = original.get_parameter
    yield decoder.embedding.weight, at("transformer.wte.weight" if gpt2 else "model.embed_tokens.weight")
    if decoder.positions is not None:
        yield decoder.positions.weight, at("transformer.wpe.weight")
    if decoder.output is not None:
        yield decoder.output.weight, at("lm_head.weight")
    last = "transformer.ln_f" if gpt2 else "model.norm"
    norms = ("ln_1", "ln_2") if gpt2 else ("input_layernorm", "post_attention_layernorm")
    yield from _same(decoder.norm, original.get_submodule(last))
    for block, layer in zip(decoder.blocks, family_of(original).layers(original), strict=True):
        attention = block.attention
        assert isinstance(attention, MHA)
        for module, name in zip((block.attention_norm, block.mlp_norm), norms, strict=True):
            yield from _same(module, original.get_submodule(f"{layer.path}.{name}"))
        for module, name in ((attention.query_norm, "q_norm"), (attention.key_norm, "k_norm")):
            if not isinstance(module, nn.Identity):
                yield from _same(module, original.get_submodule(f"{layer.attention}.{name}"))
        linears: dict[str, Any] = {name: getattr(attention, module) for name, module in LINEARS.items()}
        mlp = dict(zip(layer.matrices, ("up", "down") if gpt2 else ("gate", "up", "down"), strict=True))
        linears |= {name: getattr(block, module) for name, module in mlp.items()}
        for name, linear in linears.items():
            projection = layer.projections[name]
            yield linear.weight, projection.read(original)
            if linear.bias is not None:
                bias = projection.read_bias(original)
                assert bias is not None
                yield linear.bias, bias


def _same(module: nn.Module, original: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    named = dict(original.named_parameters())
    yield from ((parameter, named[name]) for name, parameter in module.named_parameters())


def _table(original: nn.Module) -> Any:
    """The module with a model's rotary table, or None."""
    return next((module for module in original.modules() if hasattr(module, "inv_freq")), None)


@torch.no_grad()
def unread(decoder: Decoder, options: Mapping[str, Any], source: str) -> nn.Module:
    """A model of transformers with the weights of a decoder, whose layers have the attention of that model."""
    original = huggingface.create(source, dict(options)).to(decoder.embedding.weight.dtype)
    for target, place in pairs(decoder, original):
        place.copy_(target)  # `place` is a view of the original's weight
    table = _table(original)
    scale = 1.0 if table is None else float(table.attention_scaling)
    if scale != 1.0:
        turned = (attention for attention in decoder.attentions if isinstance(attention, MHA) and attention.turned)
        for parameter in (parameter for attention in turned for parameter in scaled(attention)):
            next(place for target, place in pairs(decoder, original) if target is parameter).div_(scale)
    return original


def scaled(attention: Attention) -> list[Tensor]:
    """The parameters with the scaling of a rotary table: those of the last map before the rotation."""
    assert isinstance(attention, MHA)
    normed = not isinstance(attention.query_norm, nn.Identity)
    maps = (attention.query_norm, attention.key_norm) if normed else (attention.query, attention.key)
    return [parameter for module in maps for parameter in module.parameters()]
