"""torch.compile(fullgraph=True) of one decoding step: no graph break, no compilation anew at every step."""

import pytest
import torch

from tests.attention.mechanisms import EVERY, Mechanism, configured, error

STEPS = 10  # more than dynamo's limit of recompilations, which fullgraph turns into an error


def decode_both(mechanism: Mechanism, ragged: bool) -> int:
    """Beams of two, reordered between the steps, compiled against eager -> how often it compiled."""
    attention, rng = mechanism.build(), torch.Generator().manual_seed(1)
    compilations = 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal compilations
        compilations += 1
        return graph.forward

    torch._dynamo.reset()
    step = torch.compile(attention.extend, fullgraph=True, backend=count)
    prefix = torch.randn(2, 5, 32, generator=rng, dtype=torch.float64)
    lengths = torch.tensor([5, 2]) if ragged else None
    caches = [attention.new_cache(4, STEPS + 3, 5, prefix_batch=2) for _ in range(2)]
    start = torch.randn(4, 3, 32, generator=rng, dtype=torch.float64)
    for cache in caches:
        attention.read_prefix(prefix, lengths, cache)
        attention.extend(start, cache)
    for t in range(STEPS):
        x = torch.randn(4, 1, 32, generator=rng, dtype=torch.float64)
        assert error(step(x, caches[0]), attention.extend(x, caches[1])) < 1e-12, f"step {t}"
        rows = torch.tensor([0, 0, 2, 2]) + torch.randint(2, (4,), generator=rng)
        for cache in caches:
            cache.reorder(rows)
    assert caches[0].length == caches[1].length == STEPS + 3
    return compilations


QUICK = {
    configured(mechanism.name).attention._target_: mechanism
    for mechanism in reversed(EVERY)
    if mechanism.stride in (None, 2)
}


def quick(mechanism: Mechanism) -> bool:
    """One configuration of each class, as compiling takes seconds."""
    return mechanism in QUICK.values()


COMPILED = ("mha", "mtla", "multilinear")
CASES = [
    pytest.param(
        m, ragged, id=f"{m}-{kind}", marks=() if m.name in COMPILED and quick(m) and not ragged else pytest.mark.slow
    )
    for m in EVERY
    for ragged, kind in ((False, "uniform"), (True, "ragged"))
]


once_per_class = pytest.mark.parametrize(
    "mechanism", [pytest.param(m, id=str(m), marks=() if quick(m) else pytest.mark.slow) for m in EVERY]
)


@pytest.mark.parametrize(
    "mechanism",
    [
        pytest.param(m, id=str(m), marks=() if quick(m) and m.name == "sliding_window" else pytest.mark.slow)
        for m in EVERY
    ],
)
def test_compiled_training_equals_eager_training(mechanism: Mechanism) -> None:
    """One graph of the parallel form, forward and backward, after a prefix."""
    attention = mechanism.build().train()
    x, prefix = (torch.randn(2, n, 32, dtype=torch.float64, requires_grad=True) for n in (7, 5))
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    inputs = [x, prefix, *attention.parameters()]
    y, want = compiled(x, prefix), attention(x, prefix)
    g = torch.randn_like(want)
    assert error(y, want) < 1e-12
    for got, exact in zip(torch.autograd.grad(y, inputs, g), torch.autograd.grad(want, inputs, g), strict=True):
        assert error(got, exact) < 1e-11


@once_per_class
def test_transforms_of_torch_func(mechanism: Mechanism) -> None:
    """grad equals autograd's, and vmap over grad gives those of each row."""
    attention = mechanism.build()
    x, prefix, g = (torch.randn(2, n, 32, dtype=torch.float64) for n in (5, 3, 5))
    parameters = {name: p.detach() for name, p in attention.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, prefix: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return (torch.func.functional_call(attention, weights, (x, prefix)) * g).sum()

    got = torch.func.grad(loss)(parameters, x, prefix, g)
    want = torch.autograd.grad((attention(x, prefix) * g).sum(), list(attention.parameters()))
    for name, exact in zip(got, want, strict=True):
        assert error(got[name], exact) < 1e-10, name
    rows = [t.unsqueeze(1) for t in (x, prefix, g)]  # batches of one row
    by_row = torch.func.vmap(torch.func.grad(loss), (None, 0, 0, 0))(parameters, *rows)
    for name, exact in got.items():
        assert error(by_row[name].sum(0), exact) < 1e-10, name


@pytest.mark.parametrize(("mechanism", "ragged"), CASES)
def test_compiled_steps_equal_eager_steps(mechanism: Mechanism, ragged: bool) -> None:
    compilations = decode_both(mechanism, ragged)
    assert compilations <= 5, "compiled anew at every other step"


def test_an_export_takes_any_number_of_texts() -> None:
    mechanism = next(m for m in EVERY if m.name == "mtla")
    attention, x = mechanism.build(dtype=torch.float32).eval(), torch.randn(5, 8, 32)
    exported = torch.export.export(attention, (x[:2],), dynamic_shapes=({0: torch.export.Dim("rows", max=4096)},))
    assert error(exported.module()(x), attention(x)) < 1e-5
