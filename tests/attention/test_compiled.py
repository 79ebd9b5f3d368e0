"""torch.compile(fullgraph=True) of one decoding step: no graph break, no compilation anew at every step."""

import pytest
import torch

from tests.attention.mechanisms import EVERY, Mechanism, error

STEPS = 10  # more than dynamo's limit of recompilations, which fullgraph turns into an error


def decode_both(mechanism: Mechanism, ragged: bool, backend: str, dtype: torch.dtype, tolerance: float) -> int:
    """Beams of two, reordered between the steps, compiled against eager -> how often it compiled."""
    attention, rng = mechanism.build(dtype=dtype), torch.Generator().manual_seed(1)
    compilations = 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal compilations
        compilations += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    step = torch.compile(attention.extend, fullgraph=True, backend=count)
    prefix = torch.randn(2, 5, 32, generator=rng, dtype=dtype)
    lengths = torch.tensor([5, 2]) if ragged else None
    caches = [attention.new_cache(4, STEPS + 3, 5, prefix_batch=2) for _ in range(2)]
    start = torch.randn(4, 3, 32, generator=rng, dtype=dtype)
    for cache in caches:
        attention.read_prefix(prefix, lengths, cache)
        attention.extend(start, cache)
    for t in range(STEPS):
        x = torch.randn(4, 1, 32, generator=rng, dtype=dtype)
        assert error(step(x, caches[0]), attention.extend(x, caches[1])) < tolerance, f"step {t}"
        rows = torch.tensor([0, 0, 2, 2]) + torch.randint(2, (4,), generator=rng)
        for cache in caches:
            cache.reorder(rows)
    assert caches[0].length == caches[1].length == STEPS + 3
    return compilations


def quick(mechanism: Mechanism) -> bool:
    """One configuration of each class, as compiling takes seconds."""
    same = [m for m in EVERY if type(m.make()) is type(mechanism.make()) and m.stride in (None, 2)]
    return mechanism == same[0]


CASES = [
    pytest.param(m, ragged, id=f"{m}-{kind}", marks=() if quick(m) and not ragged else pytest.mark.slow)
    for m in EVERY
    for ragged, kind in ((False, "uniform"), (True, "ragged"))
]


@pytest.mark.parametrize(("mechanism", "ragged"), CASES)
def test_compiled_steps_equal_eager_steps(mechanism: Mechanism, ragged: bool) -> None:
    compilations = decode_both(mechanism, ragged, "eager", torch.float64, 1e-12)
    assert compilations <= 5, "compiled anew at every other step"


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [m for m in EVERY if m.stride in (None, 2)], ids=str)
def test_inductor_steps_equal_eager_steps(mechanism: Mechanism) -> None:
    decode_both(mechanism, True, "inductor", torch.float32, 1e-4)
