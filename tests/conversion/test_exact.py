"""Conversions of full rank equal the original; steps of smaller ones equal their parallel form."""

import copy
import itertools

import pytest
import torch
from torch import Tensor

from attnlab.attention import MHA, MLA, MTLA, Attention, MLAWindow, MTLAWindow
from attnlab.conversion import Conversion, ToGQA, ToMLA, ToMTLA, ToTPA
from attnlab.conversion.budget import Sharing
from attnlab.conversion.layers import convert
from attnlab.conversion.split import Latent, Rotary, project
from attnlab.conversion.statistics import Statistics, collect
from attnlab.conversion.tpa import Alternating, row_weights
from attnlab.export import deepseek
from tests.attention.mechanisms import error
from tests.conversion.exactness import WholeMLA
from tests.conversion.models import exact, tokens

ROTARY: tuple[Rotary, ...] = ("score", "two_norm", "transmla", "uniform")
LATENT: tuple[Latent, ...] = ("output_aware", "balanced", "pca", "weights")
FULL = ("llama", "llama3", "llama-biased", "smollm", "yarn", "mistral", "mistral-window", "qwen2", "qwen3", "gpt2")


def layer(name: str) -> MHA:
    attention = exact(name).attentions[0]
    assert isinstance(attention, MHA)
    return attention


def batches(width: int = 32) -> list[Tensor]:
    rng = torch.Generator().manual_seed(2)
    mixed = torch.randn(width, width, generator=rng, dtype=torch.float64) * 0.3
    return list((torch.randn(6, 20, width, generator=rng, dtype=torch.float64) @ mixed + 0.2).split(2))


@pytest.fixture(scope="module")
def statistics() -> dict[str, Statistics]:
    return {name: collect(layer(name), batches(layer(name).d_model)) for name in FULL}


def converted(target: Conversion, name: str, measured: Statistics) -> Attention:
    return target.convert(layer(name), measured, batches).attention


def assert_cached(attention: Attention, x: Tensor) -> None:
    cache = attention.new_cache(len(x), x.shape[1])
    parts = x.split([5, 1, 1, x.shape[1] - 7], 1)
    assert error(torch.cat([attention.extend(part, cache) for part in parts], 1), attention(x)) < 1e-12
    assert sum(buffer.numel() for buffer in cache.buffers()) == attention.cache_elements(len(x), x.shape[1])


@pytest.mark.parametrize("name", FULL)
def test_full_rank_is_the_original(name: str, statistics: dict[str, Statistics]) -> None:
    """Every choice of rotary components and of latents, with all rotary components and all content."""
    attention = layer(name)
    x = batches(attention.d_model)[0]
    want = attention(x)
    for rotary, latent in itertools.product(ROTARY if attention.turned else ROTARY[:1], LATENT):
        mechanism = converted(WholeMLA(rotary=rotary, latent=latent), name, statistics[name])
        assert error(mechanism(x), want) < 1e-12, (rotary, latent)
    assert_cached(mechanism, x)


def test_gpt2_is_exact_with_half_its_cache(statistics: dict[str, Statistics]) -> None:
    """Keys and values are functions of an input of half their common width."""
    attention, x = layer("gpt2"), batches()[0]
    mechanism = converted(ToMLA(keep=0.5), "gpt2", statistics["gpt2"])
    assert mechanism.cache_elements_per_token == attention.cache_elements_per_token / 2
    assert error(mechanism(x), attention(x)) < 1e-10


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("stride", [1, 2])
def test_mtla_begins_as_mla(name: str, stride: int, statistics: dict[str, Statistics]) -> None:
    """At stride 1 it equals the MLA; else slots are means, and steps equal the parallel form."""
    x, measured = batches()[0], statistics[name]
    mla = converted(ToMLA(keep=0.5, rope_dim=8), name, measured)
    window = converted(ToMTLA(keep=0.5, rope_dim=8, stride=stride, recent=3, first=1), name, measured)
    merged = converted(ToMTLA(keep=0.5, rope_dim=8, stride=stride, recent=None), name, measured)
    assert isinstance(window, MTLAWindow) and type(merged) is MTLA
    if stride == 1:
        assert error(window(x), mla(x)) < 1e-12 and error(merged(x), mla(x)) < 1e-12
    assert_cached(window, x)
    assert_cached(merged, x)


@pytest.mark.parametrize("name", ["llama", "llama3", "yarn", "mistral"])
def test_tpa_of_full_rank_is_the_original(name: str, statistics: dict[str, Statistics]) -> None:
    attention, x = layer(name), batches()[0]
    mechanism = converted(ToTPA(rank=2), name, statistics[name])
    assert error(mechanism(x), attention(x)) < 1e-12
    assert_cached(mechanism, x)


def test_contextual_factors_fit_better_than_fixed_ones(statistics: dict[str, Statistics]) -> None:
    """Every regression lowers the error, which stays above the best for each token by itself."""
    measured = statistics["llama"]
    attention, scale = layer("llama"), row_weights(measured, layer("llama"))[0]
    weight = attention.key.weight.double().unflatten(0, (2, -1))
    fitted = Alternating(1, attention.key, 2, torch.ones(1, 2).double(), weight.mean(0, keepdim=True), scale)
    errors = [fitted.error(batches)]
    for _ in range(4):
        fitted.regress_tokens(batches, 1e-12)
        errors.append(fitted.error(batches))
        fitted.regress_heads(batches, 1e-12)
        errors.append(fitted.error(batches))
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(errors)) and errors[-1] < 0.999 * errors[1]
    rows = (torch.cat(batches()).flatten(0, 1) @ attention.key.weight.mT).unflatten(-1, (2, -1)) * scale[:, None]
    assert float((torch.linalg.svdvals(rows)[:, 1:] ** 2).sum() / rows.square().sum()) <= errors[-1]


def test_pooled_heads_are_means(statistics: dict[str, Statistics]) -> None:
    attention = layer("llama-biased")
    mechanism = converted(ToGQA(groups=1), "llama-biased", statistics["llama-biased"])
    assert isinstance(mechanism, MHA) and mechanism.num_kv_heads == 1
    heads = attention.key.weight.unflatten(0, (2, -1))
    assert torch.allclose(mechanism.key.weight, heads.mean(0))
    assert_cached(mechanism, batches()[0])


def test_whitened_svd_of_weights_is_uncentred_pca() -> None:
    """For y = W x: the same error, and the output-aware latent is the best in its norm."""
    rng = torch.Generator().manual_seed(0)
    weights, x = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((10, 6), (6, 50)))
    root = torch.randn(10, 10, generator=rng, dtype=torch.float64)
    y, metric = weights @ x, root @ root.mT
    moment = y @ y.mT / 50
    projections = {method: project(method, moment, metric, 4, weights) for method in LATENT}
    for rank in range(1, 6):
        pca = projections["pca"]
        rest = y - pca.up[:, :rank] @ (pca.down[:rank] @ y)
        whitened = torch.linalg.svdvals(weights @ torch.linalg.cholesky(x @ x.mT / 50))[rank:].square().sum()
        assert torch.allclose(rest.square().sum() / 50, whitened, rtol=1e-9)
        lost: dict[Latent, float] = {
            method: float(projection.errors[rank]) for method, projection in projections.items()
        }
        assert min(lost, key=lost.__getitem__) == "output_aware" or lost["output_aware"] < 1.001 * min(lost.values())


@torch.no_grad()
@pytest.mark.parametrize("layers", ["budget", pytest.param("same", marks=pytest.mark.slow)])
def test_each_layer_keeps_its_window(layers: Sharing) -> None:
    """Some layers have one: `keep` applies to these and to the others, and steps equal the parallel form.

    DeepseekV3 has no windows.
    """
    decoder, ids = copy.deepcopy(exact("qwen2-window")), tokens(3, 20)
    originals = [attention.cache_elements(1, 20) for attention in decoder.attentions]
    replaced = convert(decoder, ToMLA(keep=0.5, layers=layers), tokens(8, 16, seed=2))
    assert [type(a) for a in decoder.attentions] == [MLA, MLAWindow]
    assert [layer.node.get("window") for layer in replaced] == [None, 5]
    assert [2 * attention.cache_elements(1, 20) for attention in decoder.attentions] == originals
    assert originals[1] == originals[0] * 5 / 20
    caches = decoder.start(3, 20)
    steps = torch.cat([decoder.step(part, caches) for part in ids.split([3, 9, 1, 1, 1, 5], 1)], 1)
    assert error(steps, decoder(ids)) < 1e-12
    assert deepseek.refusal(decoder) == "DeepseekV3 has no sliding windows, and some layers have one"
