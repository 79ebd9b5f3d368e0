"""The published algorithms equal ours: outputs and gradients, in parallel and step by step."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.attention import AbsoluteMultiLinear, Attention, RelativeMultiLinear
from attnlab.bench import baselines
from attnlab.bench.compare import failures
from attnlab.bench.exactness import check
from tests.attention.mechanisms import EVERY, Mechanism, error
from tests.bench.small import CPU, config, variants

PUBLISHED = [
    m
    for m in EVERY
    if m.name in ("mha", "mqa", "gqa", "mla", "mtla", "tpa", "tpa_kvonly", "multilinear", "multilinear_absolute")
]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("prefix_size", [0, 6, 7])
@pytest.mark.parametrize("mechanism", PUBLISHED, ids=str)
def test_parallel(mechanism: Mechanism, prefix_size: int) -> None:
    ours = mechanism.build()
    published = baselines.of(copy.deepcopy(ours))
    x, prefix, grad = random(3, 11, 32), random(3, prefix_size, 32), random(3, 11, 32)
    results = []
    for attention in (ours, published):
        inputs = [t.clone().requires_grad_() for t in (x, prefix)]
        out = attention(inputs[0], inputs[1] if prefix_size else None)
        out.backward(grad)
        used = [p for name, p in attention.named_parameters() if prefix_size or "prefix_out" not in name]
        grads = [i.grad for i in inputs if i.grad is not None] + [p.grad for p in used]
        results.append([out, *grads])
    assert len(results[0]) == len(results[1]) > 3
    for got, want in zip(*results, strict=True):
        assert want is not None and want.abs().max() > 0
        assert error(got, want) < 1e-9


@pytest.mark.parametrize("prefix_size", [0, 6, 7])
@pytest.mark.parametrize("mechanism", [m for m in PUBLISHED if m.stride != 1], ids=str)
def test_steps(mechanism: Mechanism, prefix_size: int) -> None:
    """Beams of two sentences whose rows take each other's place, then the second sentence alone."""
    ours = mechanism.build()
    both: list[Attention] = [ours, baselines.of(ours)]
    x, prefix = random(6, 9, 32), random(2, prefix_size, 32)
    caches = [a.new_cache(6, 9, prefix_size, prefix_batch=2) for a in both]
    if prefix_size:
        for attention, cache in zip(both, caches, strict=True):
            attention.read_prefix(prefix, torch.tensor([prefix_size] * 2), cache)
    for t in range(9):
        got, want = (a.extend(x[:, t : t + 1], cache) for a, cache in zip(both, caches, strict=True))
        assert error(got, want) < 1e-9
        if t == 5:  # the other three steps with one sentence
            x = x[3:]
            for cache in caches:
                cache.select(torch.tensor([1]))
        rows = torch.cat([torch.randint(first, first + 3, (3,)) for first in range(0, len(x), 3)])
        for cache in caches:
            cache.reorder(rows)
    assert caches[1].nbytes == 8 * both[1].cache_elements(3, 9, prefix_size, 1)
    if prefix_size and ours.cache_elements_per_token:
        assert caches[0].nbytes < caches[1].nbytes  # ours holds the prefix once


@pytest.mark.parametrize("form", [RelativeMultiLinear, AbsoluteMultiLinear])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("core", ["free", "softmax"])
def test_cores_are_averaged_or_read_out_apart(form: type[RelativeMultiLinear], shared: bool, core: Any) -> None:
    """Also where a text outgrows the lags."""
    window = 4 if form is RelativeMultiLinear else 11
    ours = form(12, 5, window, 3, shared_readout=shared, core=core, reads_prefix=True).double()
    published, x, prefix = baselines.of(ours), random(2, 11, 12), random(2, 3, 12)
    for text in (x, x[:, :6]):
        assert error(ours(text, prefix), published(text, prefix)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("attention", ["mha", "mqa", "mla", "mtla", "tpa"])
def test_checks_pass_in_every_precision(attention: str, dtype: torch.dtype) -> None:
    for variant in variants(config(attention=attention)):
        errors = check(variant, baselines.of, dtype, CPU)
        assert not failures(errors, "training") and not failures(errors, "decoding"), errors


def test_stride_one_is_broken_as_published_and_right_in_ours() -> None:
    ours = Mechanism("mtla", 1).build()
    published = baselines.of(ours)
    x = random(2, 9, 32)
    stepped = [
        torch.cat([a.extend(x[:, t : t + 1], c) for t in range(9)], 1)
        for a in (ours, published)
        for c in [a.new_cache(2, 9)]
    ]
    want = published(x)
    assert error(stepped[0], want) < 1e-9
    assert error(stepped[1], want) > 0.1


def test_what_the_published_step_cannot_do() -> None:
    published = baselines.of(Mechanism("mtla", 2).build())
    x = random(2, 9, 32)
    cache = published.new_cache(2, 9)
    with pytest.raises(ValueError, match="one token"):
        published.extend(x, cache)
    with pytest.raises(ValueError, match="cropped"):
        cache.crop(0)
    with pytest.raises(ValueError, match="rows of equal length"):
        published(x, lengths=torch.tensor([9, 8]))
    with pytest.raises(LookupError, match="PublishedMTLA"):
        baselines.of(published)
