"""T6: the formula, the caches, the counts of the paper's configurations."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attnlab.attention import MHA
from attnlab.attention.ops import naive
from attnlab.models import T6
from tests.attention.mechanisms import EVERY, Mechanism, error, random_chunks

SOME = [m for m in EVERY if m.name in ("mha", "mla_window", "mtla", "mtla_window", "tpa", "multilinear")]
some = pytest.mark.parametrize("mechanism", SOME, ids=str)
VOCAB = 11


def build(mechanism: Mechanism) -> T6:
    """Two layers of different weights."""
    seeds = iter((1, 2))
    model = T6(VOCAB, 32, lambda _: mechanism.build(seed=next(seeds)), 2, 24, 64, output_init="default")
    return model.double().eval()


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


@some
def test_equals_the_formula(mechanism: Mechanism) -> None:
    """u = x + attention(rms x);  z = u + W3 (silu(W1 rms u) * W2 rms u);  logits = E rms z; all without biases."""
    model = build(mechanism)
    tokens = torch.randint(VOCAB, (2, 2 * mechanism.grid + 3))
    logits = model(tokens)
    nothing = torch.zeros(0, 32, dtype=torch.float64)
    for b in range(2):
        x = model.embedding.weight[tokens[b]]
        for block in model.blocks:
            u = x + naive.attend(block.attention, rms(x), nothing)
            h = rms(u)
            gate = h @ block.gate.weight.T
            x = u + (gate / (1 + (-gate).exp()) * (h @ block.up.weight.T)) @ block.down.weight.T
        assert error(logits[b], rms(x) @ model.embedding.weight.T) < 1e-11


@some
def test_steps_equal_the_parallel_form(mechanism: Mechanism) -> None:
    model, steps, rng = build(mechanism), 2 * mechanism.grid + 3, torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (3, steps))
    want = model(tokens)
    for chunks in ([1] * steps, [steps], random_chunks(steps, rng)):
        caches = model.start(3, steps, dtype=torch.float64)
        logits = torch.cat([model.step(piece, caches) for piece in tokens.split(chunks, 1)], 1)
        assert error(logits, want) < 1e-11
        assert not logits.requires_grad
    elements = [a.cache_elements(3, steps) for a in model.attentions]
    assert [8 * count for count in elements] == [cache.nbytes for cache in caches]


@some
def test_the_loss_is_that_of_the_logits(mechanism: Mechanism) -> None:
    model = build(mechanism)
    tokens, targets = torch.randint(VOCAB, (2, 2, 7))
    logits = model(tokens)
    want = logits.exp().sum(-1).log() - logits.gather(-1, targets[..., None]).squeeze(-1)
    assert error(model.loss(tokens, targets), want) < 1e-6  # float32, as published


@some
def test_multiply_adds_of_a_step_are_as_counted(mechanism: Mechanism) -> None:
    model = build(mechanism)
    caches = model.start(1, 12, dtype=torch.float64)
    model.step(torch.zeros(1, 10, dtype=torch.int64), caches)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # fused ones are not counted
        for _ in range(2):  # one of them may merge a chunk of two
            model.step(torch.zeros(1, 1, dtype=torch.int64), caches)
    # Elementwise products, as in a gate, are not counted.
    wanted = model.multiply_adds(11) + model.multiply_adds(12)
    assert counter.get_total_flops() / 2 == pytest.approx(wanted, rel=2e-3)


def plain(**kwargs: object) -> T6:
    torch.manual_seed(0)
    return T6(VOCAB, 32, lambda _: MHA(32, 4), 2, **kwargs)  # type: ignore[arg-type]


def test_blocks_add_nothing_at_first_but_learn() -> None:
    model, tokens = plain(), torch.randint(VOCAB, (2, 9))
    assert error(model(tokens), F.linear(rms(model.embedding(tokens)), model.embedding.weight)) < 1e-6
    model.loss(tokens[:, :-1], tokens[:, 1:]).sum().backward()
    for block in model.blocks:
        assert isinstance(block.attention, MHA)
        for weight in (block.down.weight, block.attention.out.weight):
            assert not weight.any() and weight.grad is not None and weight.grad.any()
    default = plain(output_init="default")
    for block in default.blocks:
        assert isinstance(block.attention, MHA)
        assert block.down.weight.any() and block.attention.out.weight.any()


def test_the_embedding_begins_as_a_linear_layer_does() -> None:
    weight = T6(5000, 64, lambda _: MHA(64, 4), 1).embedding.weight
    assert weight.abs().max() <= 1 / 8 and weight.std().item() == pytest.approx(3**-0.5 / 8, rel=0.01)


def test_a_mechanism_without_an_output_projection_is_refused() -> None:
    class Bare(MHA):
        def __init__(self) -> None:
            super().__init__(32, 4)
            self.read_out = self.out
            del self.out

    with pytest.raises(ValueError, match="Bare has no output projection"):
        T6(VOCAB, 32, lambda _: Bare(), 1)
