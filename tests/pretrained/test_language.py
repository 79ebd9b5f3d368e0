"""Language models: the rows of q, k and v, and refusals."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnlab.compression import compress, densify, load, save
from attnlab.compression.methods.base import Method
from attnlab.compression.methods.cp_slimatt import CPSlimAtt
from attnlab.compression.methods.irratt import IrrAtt
from attnlab.compression.methods.mlp_svd import MLPSVD
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.compression.methods.truncatt import GlobalSVD, TruncAtt
from attnlab.errors import ConfigError
from attnlab.pretrained import Layer, family_of, huggingface
from tests.pretrained.tiny import OPTIONS, ids, logits, tiny

TOKENS = 4  # within the window of the tiny Mistral


def _normed(norm: Any, z: Tensor) -> Tensor:
    """Of each head, or of all heads together if the norm is as wide; z is (B, heads, T, width)."""
    if norm.weight.numel() == z.shape[-1]:
        heads: Tensor = norm(z)
        return heads
    whole: Tensor = norm(z.transpose(1, 2).flatten(2))
    return whole.unflatten(2, (z.shape[1], -1)).transpose(1, 2)


def naive(model: nn.Module, layer: Layer, x: Tensor, causal: bool) -> Tensor:
    """Attention head by head from the matrices that the family reads, without positions."""
    places = layer.projections
    parts = {name: places[name].split(places[name].read(model)) for name in "qkvo"}
    q, k, v = (x.unsqueeze(1) @ parts[name] for name in "qkv")  # (B, heads, T, width)
    for name, z in (("q", q), ("k", k), ("v", v)):
        if (bias := places[name].read_bias(model)) is not None:
            z += bias.unflatten(0, (places[name].heads, 1, -1))
    attention: Any = model.get_submodule(layer.attention or "")
    if hasattr(attention, "q_norm"):
        q, k = (_normed(norm, z) for norm, z in ((attention.q_norm, q), (attention.k_norm, k)))
    k, v = (z.repeat_interleave(q.shape[1] // z.shape[1], 1) for z in (k, v))
    scores = layer.scale * q @ k.mT
    if causal:
        scores = scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf)
    out = (scores.softmax(-1) @ v @ parts["o"].mT).sum(1)
    bias = places["o"].read_bias(model)
    return out if bias is None else out + bias


@pytest.mark.parametrize("kind", OPTIONS)
@torch.no_grad()
def test_the_matrices_are_those_of_the_attention(kind: str) -> None:
    """q, k, v, o, their heads, biases and scale give what attention gives (GPT-J takes its products in float32)."""
    model = tiny(kind).double()
    causal = kind not in ("bert", "roberta")
    seen: dict[str, Tensor] = {}
    for layer in family_of(model).layers(model):
        q, o = (model.get_submodule(layer.projections[name].path) for name in "qo")
        hooks = [
            q.register_forward_pre_hook(lambda module, args: seen.update(x=args[0])),
            o.register_forward_hook(lambda module, args, out: seen.update(y=out)),
        ]
        tokens = ids()[:, :TOKENS]
        model(tokens, position_ids=torch.zeros_like(tokens))
        for hook in hooks:
            hook.remove()
        torch.testing.assert_close(naive(model, layer, seen["x"], causal), seen["y"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float32) for kind in OPTIONS), ("llama", torch.bfloat16), ("gpt2", torch.bfloat16)],
)
@torch.no_grad()
def test_a_compressed_folder_gives_the_same_logits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """To the bit, with tied embeddings and with buffers that no weight file has."""
    model = huggingface.create("tiny", {"model_type": kind, **OPTIONS[kind]}).to(dtype)
    if dtype != torch.float32:
        plain: Any = model
        plain.save_pretrained(tmp_path / "plain")
        model = huggingface.load(str(tmp_path / "plain"), dtype=dtype)
    compress(model, MLPSVD(5))
    save(model, tmp_path / "saved", "tiny", huggingface.options_of(model))
    again = load(tmp_path / "saved")
    assert torch.equal(logits(again, ids()), logits(model, ids()))
    buffers = dict(model.named_buffers())
    for name, value in again.named_buffers():
        assert value.dtype == buffers[name].dtype and torch.equal(value, buffers.pop(name)), name
    assert not buffers
    tied = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert [name for name, _ in again.named_parameters(remove_duplicate=False)] == tied
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", [kind for kind in OPTIONS if kind not in ("bert", "roberta")])
@torch.no_grad()
def test_a_compressed_decoder_generates(kind: str) -> None:
    """With caches and left padding: what the same model with dense matrices generates, for each text alone too."""
    model: Any = tiny(kind).double()
    compress(model, TensorLLM(ranks=[14, 6]))
    dense: Any = densify(model, tiny(kind).double())
    tokens = ids(3)
    mask = torch.ones_like(tokens)
    mask[0, :3], mask[1, :1] = 0, 0
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    settings |= {"output_logits": True, "return_dict_in_generate": True}

    def steps(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
        """The logits of every step, (6, B, words)."""
        return torch.stack(model.generate(tokens, attention_mask=mask, **settings).logits)

    result = steps(model, tokens, mask)
    torch.testing.assert_close(result, steps(dense, tokens, mask), rtol=0, atol=1e-6)
    for i, part in enumerate(mask.bool()):
        alone = tokens[i, part][None]
        torch.testing.assert_close(steps(model, alone, torch.ones_like(alone))[:, 0], result[:, i], rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", [TruncAtt(8, 8), GlobalSVD(24, 8), CPSlimAtt(24, 8), IrrAtt(24, 8)])
@torch.no_grad()
def test_products_of_gpt2_generate_as_the_model_does_at_full_rank(method: Method, tmp_path: Path) -> None:
    """With caches and left padding, before and after a folder."""
    model: Any = tiny("gpt2").double()
    tokens, mask = ids(3), torch.ones(3, 7, dtype=torch.long)
    mask[0, :3], mask[1, :1] = 0, 0
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    settings |= {"output_logits": True, "return_dict_in_generate": True}

    def steps(model: Any) -> Tensor:
        return torch.stack(model.generate(tokens, attention_mask=mask, **settings).logits)

    before = steps(model)
    compress(model, method)
    torch.testing.assert_close(steps(model), before, rtol=0, atol=1e-4)
    save(model, tmp_path, "tiny", huggingface.options_of(model))
    torch.testing.assert_close(steps(load(tmp_path)), steps(model), rtol=0, atol=1e-9)


def test_save_pretrained_of_a_compressed_model_names_what_works(tmp_path: Path) -> None:
    model: Any = tiny("llama")
    compress(model, TensorLLM(ranks=[10, 4], layers=[0]))
    for same in (model, copy.deepcopy(model)):
        with pytest.raises(ConfigError, match=r"^model.layers.0.self_attn.\w+ is compressed: .* mode=export "):
            same.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    densify(model, tiny("llama")).save_pretrained(tmp_path / "dense")  # type: ignore[operator]
    assert huggingface.load(str(tmp_path / "dense"))


def test_methods_of_products_are_refused() -> None:
    """Where attention does more than products of its weights."""
    for kind, why in (("bert", "BertAttention adds its input"), ("llama", "LlamaAttention rotates queries and keys")):
        with pytest.raises(ConfigError, match=why):
            compress(tiny(kind), TruncAtt(4, 4))
