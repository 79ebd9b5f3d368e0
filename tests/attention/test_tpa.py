"""Tensor product attention: what it contains, how it begins, and which way its steps go."""

import copy
import math

import pytest
import torch
from torch import Tensor

from attnlab.attention import MHA, TPA, Attention, Cache, TPAKVOnly, TPANonContextualA, TPANonContextualB, TPASharedB
from attnlab.attention.ops import naive
from attnlab.attention.ops.backends import noting, used
from tests.attention.mechanisms import Mechanism, check_equations, error, extend_by

NAMES = ["tpa", "tpa_kvonly", "tpa_noncontextual_a", "tpa_noncontextual_b", "tpa_shared_b"]
OPTIONS = {
    "sigmoid": ("attention.nonlinearity=sigmoid",),
    "softmax": ("attention.nonlinearity=softmax",),
    "third order": ("attention.third_dim=2",),
    "norm": ("attention.output_norm=true",),
    "ranks": ("attention.rank=3", "attention.q_rank=1"),
    "all": ("attention.nonlinearity=sigmoid", "attention.third_dim=4", "attention.output_norm=true"),
}
CASES = [
    (name, option)
    for name in NAMES
    for option in OPTIONS
    if not (name == "tpa_noncontextual_b" and option in ("third order", "all"))
    and not (name == "tpa_kvonly" and option == "ranks")
]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(("name", "option"), CASES)
def test_options_equal_the_equations_forward_backward_and_cached(name: str, option: str) -> None:
    check_equations(Mechanism(name).build(*OPTIONS[option]), 5, torch.tensor([3, 2]), [[1] * 5, [2, 1, 2], [5]])


def as_products(mha: MHA) -> TPANonContextualA:
    """Non-contextual TPA with the weights of MHA, GQA or MQA (section 3.4)."""
    h, groups, width = mha.num_heads, mha.num_kv_heads, mha.head_dim
    result = TPANonContextualA(mha.d_model, h, width, rank=groups, q_rank=h).double()
    group = torch.eye(groups, dtype=torch.float64).repeat_interleave(h // groups, 1)  # which heads it has
    with torch.no_grad():
        result.head_factors.copy_(torch.cat((h * torch.eye(h, dtype=torch.float64), groups * group, groups * group)))
        result.factors.weight.copy_(torch.cat((mha.query.weight, mha.key.weight, mha.value.weight)))
        result.out.weight.copy_(mha.out.weight)
    return result


@pytest.mark.parametrize("groups", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("width", [8, 12])
def test_mha_gqa_and_mqa_are_non_contextual_products(groups: int, width: int) -> None:
    mha = MHA(32, 4, groups, width, bias=False).double()
    tpa = as_products(mha)
    assert tpa.cache_elements_per_token == mha.cache_elements_per_token
    x, prefix = random(2, 7, 32), random(2, 5, 32)
    lengths = torch.tensor([5, 2])
    want = mha(x, prefix, prefix_lengths=lengths)
    assert error(tpa(x, prefix, prefix_lengths=lengths), want) < 1e-12
    cache = tpa.new_cache(2, 7, 5)
    tpa.read_prefix(prefix, lengths, cache)
    assert error(extend_by(tpa, x, cache, [1, 4, 1, 1]), want) < 1e-12


@pytest.mark.parametrize("turn", [naive.adjacent, naive.opposite], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_with_permuted_weights_it_is_the_published_rotation(name: str, turn: naive.Turn) -> None:
    """The training code turns half-split pairs the other way, the inference code adjacent pairs."""
    published = Mechanism(name).build()
    assert isinstance(published, TPA)
    x, prefix = random(6, 32), random(4, 32)
    want, width = naive.attend(published, x, prefix, turn), published.head_dim
    if turn is naive.adjacent:
        p = torch.cat((torch.arange(0, width, 2), torch.arange(1, width, 2)))
    else:
        p = torch.arange(width).roll(width // 2)
    permuted = copy.deepcopy(published)
    shared = isinstance(permuted, TPASharedB)  # then values are permuted as well, and put back by the output projection
    with torch.no_grad():
        rows = permuted.q_rank + (2 if name != "tpa_shared_b" else 1) * permuted.rank
        turned = rows if shared else permuted.q_rank + permuted.rank
        if isinstance(permuted, TPANonContextualB):
            permuted.token_factors[:turned] = permuted.token_factors[:turned, p]
        else:
            tokens = permuted.factors.weight[-(permuted.q_rank + (1 if shared else 2) * permuted.rank) * width :]
            tokens = tokens.view(-1, width, 32)
            tokens[:turned] = tokens[:turned, p]
        if isinstance(permuted, TPAKVOnly):
            query = permuted.query.weight.view(-1, width, 32)
            query.copy_(query[:, p].clone())
        if shared:
            out = permuted.out.weight.view(32, -1, width)
            out.copy_(out[..., p].clone())
    assert error(permuted(x[None], prefix[None])[0], want) < 1e-12
    assert error(published(x[None], prefix[None])[0], want) > 1e-4


@pytest.mark.parametrize(
    ("init", "bounds"),
    [  # head factors of queries, of keys and values; token factors of both (spec 1.6: d 768, 34 x 64, ranks 6, 2)
        ("released", (0.0353, 0.0612, 0.01101, 0.01103)),
        ("paper_merged", (0.0786, 0.0847, 0.0722, 0.0818)),
        ("paper_per_rank", (0.0865, 0.0865, 0.0849, 0.0849)),
    ],
)
def test_initial_weights_fill_their_bounds(init: str, bounds: tuple[float, ...]) -> None:
    tpa = TPA(768, 34, 64, init=init)  # type: ignore[arg-type]
    parts = tpa.factors.weight.detach().split([34 * 6, 34 * 2, 34 * 2, 64 * 6, 64 * 2, 64 * 2])
    for part, which in zip(parts, (0, 1, 1, 2, 3, 3), strict=True):
        assert float(part.abs().max()) == pytest.approx(bounds[which], rel=0.01)
        assert float(part.std()) == pytest.approx(bounds[which] / math.sqrt(3), rel=0.02)
    kvonly = TPAKVOnly(768, 22, 64, init=init)  # type: ignore[arg-type]
    assert float(kvonly.query.weight.detach().abs().max()) == pytest.approx(math.sqrt(6 / (768 + 22 * 64)), rel=0.01)


def test_backward_keeps_factors_and_not_what_is_built_of_them() -> None:
    """Bytes saved for backward at the small T6's sizes, weights left out: at most 1.3 times MHA's."""

    def saved_bytes(attention: Attention, x: Tensor) -> int:
        weights = {p.untyped_storage().data_ptr() for p in attention.parameters()}
        result: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            if t.untyped_storage().data_ptr() not in weights:
                result[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = attention(x)  # alive until all is counted: a freed address might be used again
            return sum(result.values()) + 0 * y.ndim

    x = torch.randn(1, 128, 768, requires_grad=True)
    assert saved_bytes(TPA(768, 34, 64), x) <= 1.3 * saved_bytes(MHA(768, 12, bias=False), x)


def ways(attention: TPA, cache: Cache, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The same new positions on factors, and on keys and values built again."""
    result = []
    for on_factors in (True, False):
        copied = copy.deepcopy(cache)
        monkeypatch.setattr(TPA, "in_factor_space", lambda *_, on_factors=on_factors: on_factors)
        result.append(attention.extend(x, copied))
    monkeypatch.undo()
    return result


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_both_ways_are_exact_over_many_tiles(name: str, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, prefix, x = Mechanism(name).build(), random(2, 7, 32), random(6, 12, 32)
    assert isinstance(attention, TPA)
    monkeypatch.setattr("attnlab.attention.tpa.contextual.TILE", 4)
    cache, lengths = attention.new_cache(6, 12, 7, prefix_batch=2), torch.tensor([7, 3])
    attention.read_prefix(prefix, lengths, cache)
    attention.extend(x[:, :9], cache)
    monkeypatch.undo()
    three, two = lengths.repeat_interleave(3), prefix.repeat_interleave(3, 0)
    want = attention(x, two, prefix_lengths=three)[:, 9 : 9 + new]
    monkeypatch.setattr("attnlab.attention.tpa.contextual.TILE", 4)
    for got in ways(attention, cache, x[:, 9 : 9 + new], monkeypatch):
        assert error(got, want) < 1e-12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 9}, "rank=9: expected 1 to 4; 4 heads x 8 have no more ranks"),
        ({"rank": 0}, "rank=0: expected 1 to 4"),
        ({"rank": 2, "q_rank": 6}, "q_rank=6: expected 1 to 4"),
        ({"third_dim": 3}, "third_dim=3: expected a divisor of head_dim=8"),
        ({"third_dim": 8}, "rotates pairs"),
    ],
)
def test_what_cannot_be(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TPA(32, 4, 8, **({"q_rank": 4} | arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [TPANonContextualA, TPAKVOnly])
def test_frequencies_of_another_model_turn_as_in_the_equations(kind: type[TPA]) -> None:
    """As convert=tpa has them, with the factors' biases."""
    more = {"bias": True} if kind is TPAKVOnly else {"q_rank": 4}
    attention = kind(32, 4, rank=2, rope_theta=None, **more).double()
    attention.frequencies = torch.tensor([0.7, 0.1, 0.03, 1e-4], dtype=torch.float64)
    x = torch.randn(1, 7, 32, dtype=torch.float64)
    assert error(attention(x)[0], naive.attend(attention, x[0])) < 1e-12


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, ("attention.third_dim=2",) if third else ()) for name in NAMES for third in (False, True)
     if name != "tpa_noncontextual_b" or not third],
)  # fmt: skip
def test_a_layer_whose_positions_begin_later(
    name: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits depend on differences of positions alone (theorem 1), in parallel and step by step, with a prefix."""
    assert isinstance(attention := Mechanism(name).build(*options), TPA)
    x, prefix, lengths = random(2, 5, 32), random(2, 3, 32), torch.tensor([3, 2])
    want, table = attention(x, prefix, prefix_lengths=lengths), attention.rotary_table

    def later(length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = table(length + 1000, like)
        return cos[1000:], sin[1000:]

    monkeypatch.setattr(attention, "rotary_table", later)
    assert error(attention(x, prefix, prefix_lengths=lengths), want) < 1e-12
    cache = attention.new_cache(2, 5, 3)
    attention.read_prefix(prefix, lengths, cache)
    assert error(extend_by(attention, x, cache, [1, 3, 1]), want) < 1e-12


def test_heads_that_torch_cannot_read_are_trained_by_products() -> None:
    attention = TPA(8, 4, rank=1, q_rank=1)  # heads 2 wide
    with noting() as pairs:
        attention(torch.randn(2, 3, 8)).sum().backward()
    assert used(pairs)["merged"] == ["PLAIN"] and all(p.grad is not None for p in attention.parameters())
