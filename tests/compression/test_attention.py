"""The modules against the equations, head by head."""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from attnlab.compression.modules.attention import CALL, CompressedAttention, FactoredAttention, SlimAttention, buckets

RANKS = [7, 5, 4, 1]
VALUES = [3, 5, 2, 4]


def random(module: CompressedAttention) -> CompressedAttention:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module.double()


def by_head(module: FactoredAttention | SlimAttention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Equations 1, 2 and 4, with one loop over heads and one over what mixes them."""
    query, key, value = module.qkv.weight.split([module.rank, module.rank, module.value_rank])
    q, k = x @ query.T + module.query_bias, x @ key.T
    if isinstance(module, SlimAttention):
        logits = [q @ torch.diag(row) @ k.mT for row in module.weights]
    else:
        pairs = zip(q.split(module.ranks, -1), k.split(module.ranks, -1), strict=True)
        products = [a @ b.mT for a, b in pairs]
        fusion = torch.eye(len(products)).to(x) if module.fusion is None else module.fusion
        logits = [sum((w * one for w, one in zip(row, products, strict=True)), torch.zeros(())) for row in fusion]
    y = module.proj.bias
    values = value.split(module.value_ranks)
    for one, v, o in zip(logits, values, module.proj.weight.split(module.value_ranks, -1), strict=True):
        one = one * module.scale if mask is None else (one * module.scale).masked_fill(~mask, float("-inf"))
        y = y + one.softmax(-1) @ (x @ v.T) @ o.T
    return y


MODULES = {
    "irregular": lambda: FactoredAttention(10, RANKS, VALUES, 0.3),
    "uniform": lambda: FactoredAttention(10, [8] * 4, [8] * 4, 0.3, out_dim=6),
    "narrow": lambda: FactoredAttention(10, [2] * 4, [5] * 4, 0.3),
    "buckets": lambda: FactoredAttention(10, [64, 9, 8, 8, 8, 1], [8] * 6, 0.3),
    "fused": lambda: FactoredAttention(10, RANKS, VALUES, 0.3, fused=True),
    "slim": lambda: SlimAttention(10, 9, [4] * 3, 0.3, out_dim=6),
    "slim irregular": lambda: SlimAttention(10, 9, [5, 1, 3], 0.3),
    "slim constrained": lambda: SlimAttention(10, 9, [4] * 3, 0.3, constrained=True),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("masked", [False, True, "causal"])
def test_forward_and_backward(name: str, masked: bool | str) -> None:
    module = random(MODULES[name]())
    x = torch.randn(3, 7, 10, dtype=torch.float64, requires_grad=True)
    allowed = torch.ones(7, 7, dtype=torch.bool).tril() if masked else None
    y = module(x, is_causal=True) if masked == "causal" else module(x, attn_mask=allowed)
    expected = by_head(module, x, allowed)  # type: ignore[arg-type]
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(y)
    sources = [x, *module.parameters()]
    gradients = torch.autograd.grad((y * weights).sum(), sources)
    reference = torch.autograd.grad((expected * weights).sum(), sources)
    for gradient, expected_gradient in zip(gradients, reference, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["fused", "slim"])
def test_parts_of_a_batch_are_the_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = random(MODULES[name]())
    x = torch.randn(5, 7, 10, dtype=torch.float64)
    complete = module(x)
    monkeypatch.setattr("attnlab.compression.modules.attention.CACHED", 2 * 4 * 49)
    with torch.no_grad():
        torch.testing.assert_close(module(x), complete, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(name: str, dtype: torch.dtype) -> None:
    module = random(MODULES[name]())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.3)
    x = torch.randn(2, 7, 10, dtype=torch.float64)
    expected = module(x)
    y = module.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    assert float((y - expected).norm() / expected.norm()) < (1e-5 if dtype == torch.float32 else 0.05)


def test_dropout_only_in_training() -> None:
    for module in (
        FactoredAttention(10, [3, 2], [2, 2], 1.0, attn_drop=0.5),
        SlimAttention(10, 3, [2, 2], 1.0, attn_drop=0.5),
    ):
        x = torch.randn(2, 7, 10, dtype=torch.float64)
        assert not torch.equal(random(module)(x), module(x))
        assert torch.equal(module.eval()(x), module(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FactoredAttention(10, [1, 2], [1, 1], 1.0), "the largest first"),
        (lambda: FactoredAttention(10, [1, 0], [1, 1], 1.0), "at least 1"),
        (lambda: SlimAttention(10, 0, [1, 1], 1.0), "at least 1"),
        (lambda: SlimAttention(10, 1, [1, 1], 1.0, constrained=True), "needs as many columns"),
    ],
)
def test_ranks_that_cannot_be(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_compiled_as_one_graph() -> None:
    for name in ("irregular", "fused", "slim constrained"):
        module = random(MODULES[name]()).eval()
        x = torch.randn(2, 7, 10, dtype=torch.float64)
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), module(x))


def test_buckets_are_the_cheapest_of_all() -> None:
    ranks = [64, 40, 33, 17, 9, 8, 2]
    result = buckets(ranks, [8] * 7)
    assert [result[0].first, *(b.end for b in result)] == sorted({0, *(b.end for b in result)})
    assert result[-1].end == 7 and len(result) <= 3
    for bucket in result:
        assert bucket.width % 8 == 0 and bucket.width >= max(ranks[bucket.first : bucket.end])
    price = sum((b.end - b.first) * b.width for b in result) + CALL * len(result)
    for count in (1, 2, 3):
        for cuts in combinations(range(1, 7), count - 1):
            edges = [0, *cuts, 7]
            other = sum((b - a) * -(-ranks[a] // 8) * 8 for a, b in zip(edges, edges[1:], strict=False))
            assert price <= other + CALL * count
