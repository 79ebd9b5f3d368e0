"""Multi-linear attention beyond the promises: what cores and read-outs are worth, windows, and the encoder form."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.attention import (
    AbsoluteMultiLinear,
    RelativeMultiLinear,
    SummedMultiLinear,
    TiedMultiLinear,
)
from attnlab.attention.multilinear import MultiLinear
from tests.attention.mechanisms import check_equations, error, random_chunks

D, R = 12, 5
HUGE = 1e6
FORMS: dict[str, Callable[..., MultiLinear]] = {
    "relative": lambda **kwargs: RelativeMultiLinear(D, R, 4, **kwargs),
    "absolute": lambda **kwargs: AbsoluteMultiLinear(D, R, 11, **kwargs),
    "summed": lambda **kwargs: SummedMultiLinear(D, R, **kwargs),
    "tied": lambda **kwargs: TiedMultiLinear(D, R, 7, **kwargs),
}
every = pytest.mark.parametrize("form", FORMS)


def build(form: str, num_cores: int = 1, **kwargs: bool | str) -> MultiLinear:
    return FORMS[form](num_cores=num_cores, **kwargs).double().eval()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def copied(source: MultiLinear, target: MultiLinear) -> MultiLinear:
    """`target` with those weights of `source` that have a place in it; cores are left."""
    weights = {name: value for name, value in source.state_dict().items() if name != "cores"}
    assert not target.load_state_dict(weights, strict=False).unexpected_keys
    return target


@every
@pytest.mark.parametrize(
    "cores", [(1, True, "free"), (2, True, "free"), (3, False, "free"), (2, True, "softmax"), (3, False, "softmax")]
)
def test_equals_the_equations_past_the_window(form: str, cores: tuple[int, bool, str]) -> None:
    """Forward, gradients and every chunking; prefixes of several lengths, shared by two rows each."""
    attention = build(form, cores[0], shared_readout=cores[1], core=cores[2], reads_prefix=True)
    rng = torch.Generator().manual_seed(1)
    chunkings = [[1] * 11, [11], random_chunks(11, rng), random_chunks(11, rng)]
    check_equations(attention, 11, torch.tensor([3, 0, 5]), chunkings)


@every
def test_two_cores_with_one_readout_are_one_core(form: str) -> None:
    """Also any number of them: their mean is the core."""
    for count in (2, 5):
        many = build(form, count, reads_prefix=True)
        single = copied(many, build(form, 1, reads_prefix=True))
        with torch.no_grad():
            single.cores.copy_(many.cores.mean(0, keepdim=True))
        x, prefix = draw(2, 9, D), draw(2, 3, D)
        assert error(many(x, prefix), single(x, prefix)) < 1e-14


@every
def test_softmax_cores_are_on_the_simplex_and_have_the_functions_of_free_ones(form: str) -> None:
    """Also their mean. A free core with softmax's values gives the same; any free core is one, times rows of W_q."""
    soft, free = build(form, 3, core="softmax", reads_prefix=True), build(form, 3, reads_prefix=True)
    assert torch.all((soft.cores >= 0) & (soft.cores < 1)) and soft.core_weights().shape == (3, R)
    assert error(soft.core_weights().mean(0).sum(), torch.ones(())) < 1e-15
    copied(soft, free)
    with torch.no_grad():
        soft.cores.normal_(std=2.0)
        free.cores.copy_(soft.core_weights())
    x, prefix = draw(2, 9, D), draw(2, 3, D)
    assert error(free(x, prefix), soft(x, prefix)) < 1e-14
    anywhere = build(form, reads_prefix=True)
    on_it = copied(anywhere, build(form, core="softmax", reads_prefix=True))
    with torch.no_grad():
        anywhere.cores.copy_(draw(1, R) * 5)
        on_it.qkv.weight[:R] *= (anywhere.cores / on_it.core_weights()).T
    assert error(on_it(x, prefix), anywhere(x, prefix)) < 1e-13
    with pytest.raises(ValueError, match="core=max: expected free or softmax"):
        build(form, core="max")


@torch.no_grad()
@pytest.mark.parametrize("core", ["free", "softmax"])
@pytest.mark.parametrize(
    ("kind", "sizes", "entries"),  # read by one core's read-out, and the variance of each
    [
        (RelativeMultiLinear, [8], (64, 1.0)),
        (AbsoluteMultiLinear, [8], (64, 1.0)),
        (SummedMultiLinear, [], (16, 1 / 16)),  # one for each r instead of their sum
        (TiedMultiLinear, [8], (8, 1.0)),
    ],
)
def test_initial_weights_give_a_variance_of_one(
    kind: Any, sizes: list[int], entries: tuple[int, float], core: str
) -> None:
    """q, k and v from d inputs, A_ijm = sum_r g_r q_r k_r v_r, and the sum over all read-outs.

    Softmax cores begin sqrt(R) smaller, and their read-outs larger.
    """
    torch.manual_seed(0)
    attention = kind(64, 16, *sizes, num_cores=32, shared_readout=False, core=core)
    gain, total = 16**0.5 if core == "softmax" else 1.0, 32 * entries[0] * entries[1]
    assert attention.out.in_features == 32 * entries[0]
    assert float(attention.qkv.weight.std()) == pytest.approx(64**-0.5, rel=0.05)
    assert float(attention.out.weight.std()) == pytest.approx(gain * total**-0.5, rel=0.05)
    assert core == "softmax" or float(16 * attention.cores.square().mean()) == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize("form", ["relative", "absolute"])
def test_readouts_of_their_own_are_one_readout_of_rank_h(form: str) -> None:
    """sum_c W_c vec(A^c) = sum_jmr W[:,j,m,r] q_r k_jr v_mr with W[..., r] = sum_c W_c[:,j,m] g_cr: rank h along r."""
    attention, steps = build(form, 2, shared_readout=False), 4
    x, slots = draw(1, steps, D), 4 if form == "relative" else 11
    assert isinstance(attention.out, torch.nn.Linear)
    weights = attention.out.weight.view(D, 2, slots, slots)
    tensor = torch.einsum("dcjm,cr->djmr", weights, attention.cores)
    assert torch.linalg.matrix_rank(tensor.reshape(-1, R)) == 2
    q, k, v = (x @ attention.qkv.weight.T).split(R, -1)
    last = tensor[:, -steps:, -steps:] if form == "relative" else tensor[:, :steps, :steps] * slots / steps
    want = torch.einsum("djmr,r,jr,mr->d", last, q[0, -1], k[0], v[0])
    assert error(attention(x)[0, -1], want) < 1e-13


def test_softmax_attention_is_no_sum_over_the_tensor() -> None:
    """It leaves the span of Q, K and V (theorem 3.1), and it knows the order of the keys (corollary 1)."""
    basis = torch.linalg.qr(draw(9, 4))[0]
    q, k, v = basis @ draw(4, 6), basis @ draw(4, 6), (basis @ draw(4, 1)).expand(9, 6)  # v: the corollary's condition
    attended, moved = (torch.softmax(q @ keys.mT / 6**0.5, -1) @ v for keys in (k, k.roll(1, 0)))
    assert error(basis @ basis.mT @ attended, attended) > 0.05 and error(moved, attended) > 0.05
    summed = [torch.einsum("r,ir,jr,mr->im", draw(6).fill_(0.5), q, keys, v) for keys in (k, k.roll(1, 0))]
    assert error(*summed) < 1e-13


def test_the_tied_form_is_linear_attention() -> None:
    """Q diag(g) K^T V under a causal mask, by rows averaged; over several chunks as over one."""
    attention = build("tied", 1)
    assert isinstance(attention, TiedMultiLinear)
    x = draw(2, 19, D)
    q, k, v = (x @ attention.qkv.weight.T).split([R, R, 7], -1)
    mean = ((q * attention.cores[0]) @ k.mT).tril() @ v / torch.arange(1, 20)[:, None]
    for chunk in (64, 19, 8, 3, 1):
        attention.chunk = chunk
        assert error(attention(x), mean @ attention.get_parameter("out.weight").T) < 1e-13


@pytest.mark.parametrize("cores", [(1, True), (2, False)])
def test_the_scan_is_the_naive_sum(cores: tuple[int, bool]) -> None:
    attention = AbsoluteMultiLinear(D, R, 11, cores[0], shared_readout=cores[1]).double()
    assert [attention.scans(steps) for steps in (1, 3, 4, 11)] == [False, False, True, True]  # 60 / 17 = 3.5
    x = draw(2, 11, D)
    g, results = torch.randn_like(x), []
    for block in (11, 1, 3, 5):  # the first: no scan
        y = attention.read_blocks(*attention.project(x), block)
        results.append([y, *torch.autograd.grad(y, list(attention.parameters()), g)])
    assert all(error(*pair) < 1e-12 for other in results[1:] for pair in zip(other, results[0], strict=True))
    assert error(attention(x), results[0][0]) < 1e-12


def test_a_text_longer_than_the_absolute_window_is_refused() -> None:
    attention = build("absolute")
    with pytest.raises(ValueError, match="12 positions is longer than the window of 11"):
        attention(draw(1, 12, D))
    with pytest.raises(ValueError, match="window of 11"):
        attention.new_cache(1, 12)
    assert attention.max_positions == 11


@every
def test_a_prefix_without_a_readout_is_refused(form: str) -> None:
    attention, x = build(form), draw(2, 3, D)
    with pytest.raises(ValueError, match="reads_prefix=True"):
        attention(x, x)
    with pytest.raises(ValueError, match="reads_prefix=True"):
        attention.read_prefix(x, None, attention.new_cache(2, 3, 3))
    assert not attention.new_cache(2, 3, 3).buffers()[1].numel()


@pytest.mark.parametrize(("num_cores", "core"), [(1, "free"), (3, "free"), (3, "softmax")])
def test_the_encoder_form_of_the_tied_one(num_cores: int, core: Any) -> None:
    """Its formula, in both directions, row by row; padding changes nothing and gets no gradient."""
    attention = build("tied", num_cores, shared_readout=False, core=core)
    cores = [g.exp() / g.exp().sum() if core == "softmax" else g for g in attention.cores]
    x, lengths = draw(3, 8, D), torch.tensor([6, 1, 4])
    x[torch.arange(8) >= lengths[:, None]] = HUGE
    x.requires_grad_()
    y = attention.encode(x, lengths)
    for b, size in enumerate(lengths.tolist()):
        q, k, v = (x[b, :size] @ attention.qkv.weight.T).split([R, R, 7], -1)
        for i in range(size):
            read = [torch.stack([(g * q[i] * k[j]).sum() * v[j] for j in range(size)]).mean(0) for g in cores]
            assert error(y[b, i], attention.get_parameter("out.weight") @ torch.cat(read)) < 1e-12
    inside = torch.arange(8) < lengths[:, None]
    (grad,) = torch.autograd.grad(y[inside].sum(), x)
    assert torch.equal((grad != 0).any(-1), inside)


def test_the_compiled_absolute_form_keeps_its_own_backward() -> None:
    attention, graphs = AbsoluteMultiLinear(D, R, 11).double(), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    torch._dynamo.reset()
    x = draw(2, 11, D).requires_grad_()
    inputs, grad = [x, *attention.parameters()], draw(2, 11, D)
    got, want = torch.compile(attention, backend=backend, fullgraph=True)(x), attention(x)
    assert error(got, want) < 1e-13
    for actual, exact in zip(
        torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True
    ):
        assert error(actual, exact) < 1e-12
    assert len(graphs) == 1 and "autograd_function_apply" in graphs[0]  # of the strips, not zeros of N x N for each
