"""What every mechanism in conf/attention promises about its parallel form (design: the attention interface)."""

import copy
import inspect
import itertools

import pytest
import torch
from torch import Tensor

from attnlab.attention import TPA, Attention
from attnlab.attention.ops import naive
from tests.attention.mechanisms import EVERY, Mechanism, check_visibility, configured, error, prefix_lengths

every = pytest.mark.parametrize("mechanism", EVERY, ids=str)
KINDS = list({type(mechanism.make()): None for mechanism in EVERY})
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 1e-4,
    torch.float16: 0.02,
    torch.bfloat16: 0.1,
}  # largest error over root mean square
NAN = float("nan")  # the values in padding: any leak is visible


def prefixes(
    mechanism: Mechanism, kind: str, dtype: torch.dtype = torch.float64
) -> tuple[int, Tensor | None, Tensor | None]:
    """Batch size, prefix and its lengths."""
    if kind == "none":
        return 2, None, None
    lengths = prefix_lengths(mechanism.grid)
    if kind == "uniform":
        return 2, torch.randn(2, 2 * mechanism.grid + 1, 32, dtype=dtype), None
    return len(lengths), torch.randn(len(lengths), int(lengths.max()), 32, dtype=dtype), lengths


def gradients(attention: Attention, y: Tensor, g: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    wanted = [t for t in inputs if t is not None] + list(attention.parameters())
    grads = torch.autograd.grad(y, wanted, g, allow_unused=True)
    return [torch.zeros_like(w) if grad is None else grad for w, grad in zip(wanted, grads, strict=True)]


@every
@pytest.mark.parametrize("kind", ["none", "uniform"])
def test_every_position_reads_what_is_declared_and_nothing_else(mechanism: Mechanism, kind: str) -> None:
    batch, prefix, _ = prefixes(mechanism, kind)
    check_visibility(mechanism.build(), batch, 2 * mechanism.grid + 3, prefix)


@every
@pytest.mark.parametrize("kind", ["none", "uniform", "ragged"])
def test_fast_path_equals_the_equations_forward_and_backward(mechanism: Mechanism, kind: str) -> None:
    attention, steps = mechanism.build(), 2 * mechanism.grid + 2
    batch, prefix, lengths = prefixes(mechanism, kind)
    x = torch.randn(batch, steps, 32, dtype=torch.float64, requires_grad=True)
    if prefix is not None:
        prefix.requires_grad_()
    kind_of = type(attention)
    assert kind_of in naive.FORMULAS, f"write the naive form of {kind_of.__name__} in attention/ops/naive.py"
    y = attention(x, prefix, prefix_lengths=lengths)
    sizes = [0] * batch if prefix is None else [prefix.shape[1]] * batch if lengths is None else lengths.tolist()
    rows = [naive.attend(attention, x[b], None if prefix is None else prefix[b, :size]) for b, size in enumerate(sizes)]
    want, g = torch.stack(rows), torch.randn_like(y)
    assert error(y, want) < 1e-12
    fast, slow = gradients(attention, y, g, x, prefix), gradients(attention, want, g, x, prefix)
    assert max(error(a, b) for a, b in zip(fast, slow, strict=True)) < 1e-11


@every
def test_logits_hundreds_apart_stay_exact(mechanism: Mechanism) -> None:
    attention = mechanism.build()
    loud = 10 if isinstance(attention, TPA) else 100  # its logits are of up to the fourth degree in x, not the second
    x = (loud * torch.randn(1, 2 * mechanism.grid + 3, 32, dtype=torch.float64)).requires_grad_()
    prefix = loud * torch.randn(1, mechanism.grid + 1, 32, dtype=torch.float64)
    y, want = attention(x, prefix), naive.attend(attention, x[0], prefix[0])[None]
    g = torch.randn_like(y)
    assert error(y, want) < 1e-10
    assert error(torch.autograd.grad(y, x, g)[0], torch.autograd.grad(want, x, g)[0]) < 1e-9
    low = copy.deepcopy(attention).float()
    x32 = x.detach().float().requires_grad_()
    y32 = low(x32, prefix.float())
    y32.sum().backward()
    assert y32.isfinite().all() and x32.grad is not None and x32.grad.isfinite().all()


@every
def test_a_padded_row_gets_what_it_gets_alone(mechanism: Mechanism) -> None:
    """Forward, and the gradients of inputs and weights; the padding holds NaN and gets no gradient."""
    attention = mechanism.build()
    batch, prefix, read = prefixes(mechanism, "ragged")
    assert prefix is not None and read is not None
    lengths = torch.arange(batch) % (2 * mechanism.grid + 2) + 1
    x = torch.randn(batch, int(lengths.max()) + 1, 32, dtype=torch.float64)
    prefix = torch.cat((prefix, prefix[:, :1]), 1)  # padding behind the longest prefix as well
    text_pad = torch.arange(x.shape[1]) >= lengths[:, None]
    prefix_pad = torch.arange(prefix.shape[1]) >= read[:, None]
    x[text_pad], prefix[prefix_pad] = NAN, NAN
    x.requires_grad_(), prefix.requires_grad_()
    y = attention(x, prefix, lengths=lengths, prefix_lengths=read)
    g = torch.randn_like(y).masked_fill(text_pad[..., None], 0.0)
    of_x, of_prefix, *of_weights = gradients(attention, y, g, x, prefix)
    assert not of_x[text_pad].any() and not of_prefix[prefix_pad].any()
    totals = [torch.zeros_like(p) for p in of_weights]
    for b in range(batch):
        x_b = x[b : b + 1, : lengths[b]].detach().requires_grad_()
        p_b = prefix[b : b + 1, : read[b]].detach().requires_grad_()
        alone = attention(x_b, p_b)
        assert error(y[b : b + 1, : lengths[b]], alone) < 1e-12
        gx, gp, *weights = gradients(attention, alone, g[b : b + 1, : lengths[b]], x_b, p_b)
        assert error(of_x[b : b + 1, : lengths[b]], gx) < 1e-11
        assert not read[b] or error(of_prefix[b : b + 1, : read[b]], gp) < 1e-11
        totals = [t + w for t, w in zip(totals, weights, strict=True)]
    assert max(error(a, b) for a, b in zip(of_weights, totals, strict=True)) < 1e-11


@every
def test_the_encoder_form_of_a_padded_row_is_what_it_gets_alone(mechanism: Mechanism) -> None:
    attention, lengths = mechanism.build(), torch.tensor([6, 1, 3])
    x = torch.randn(3, 7, 32, dtype=torch.float64)
    padding = torch.arange(7) >= lengths[:, None]
    x[padding] = NAN
    y = attention.encode(x.requires_grad_(), lengths)
    g = torch.randn_like(y).masked_fill(padding[..., None], 0.0)
    of_x, *of_weights = gradients(attention, y, g, x)
    assert not of_x[padding].any()
    totals = [torch.zeros_like(p) for p in of_weights]
    for b, length in enumerate(lengths.tolist()):
        x_b = x[b : b + 1, :length].detach()
        alone = attention.encode(x_b, lengths[b : b + 1])
        assert error(y[b : b + 1, :length], alone) < 1e-12
        totals = [t + w for t, w in zip(totals, gradients(attention, alone, g[b : b + 1, :length]), strict=True)]
    assert max(error(a, b) for a, b in zip(of_weights, totals, strict=True)) < 1e-11


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_heads_divide_the_width_unless_they_have_a_width(kind: type) -> None:
    options = inspect.signature(kind).parameters
    if "head_dim" not in options or options["head_dim"].default is not None:
        pytest.skip("no heads, or heads of another width")
    with pytest.raises(ValueError, match="^num_heads=6 does not divide d_model=256"):
        kind(256, 6)
    assert kind(256, 6, head_dim=32)(torch.randn(1, 3, 256)).shape == (1, 3, 256)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_size_of_zero_is_an_error_of_one_line(kind: type) -> None:
    options = inspect.signature(kind).parameters
    sizes = {"d_model": 32, "num_heads": 4, "rank": 2, "num_cores": 4, "window": 4}
    for name in options.keys() & {"num_kv_heads", "head_dim", "latent_dim", *sizes}:
        with pytest.raises(ValueError, match=rf"^{name}\W.*0.*$"):
            kind(**{option: size for option, size in sizes.items() if option in options} | {name: 0})


@every
def test_an_empty_prefix_is_no_prefix(mechanism: Mechanism) -> None:
    attention, x = mechanism.build(), torch.randn(2, 5, 32, dtype=torch.float64)
    want = attention(x)
    assert error(attention(x, x[:, :0]), want) < 1e-12
    nothing = torch.full((2, 4, 32), NAN, dtype=torch.float64)
    assert error(attention(x, nothing, prefix_lengths=torch.tensor([0, 0])), want) < 1e-12


@every
def test_empty_texts_give_empty_tensors(mechanism: Mechanism) -> None:
    attention = mechanism.build()
    for shape, size, training in itertools.product([(2, 0), (0, 3), (0, 0)], [None, 0, 4], [False, True]):
        x, prefix = (
            torch.randn(*shape, 32).double().requires_grad_(),
            None if size is None else torch.randn(shape[0], size, 32).double(),
        )
        attention.train(training)
        for sizes in (None, torch.full((shape[0],), size or 0)):
            y = attention(x, prefix, lengths=torch.full((shape[0],), shape[1]), prefix_lengths=sizes)
            assert y.shape == x.shape and y.dtype == x.dtype
            y.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


@every
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_precisions(mechanism: Mechanism, dtype: torch.dtype) -> None:
    """Against the same rounded weights and inputs in float64: only the arithmetic differs."""
    low = mechanism.build(dtype=dtype)
    exact = copy.deepcopy(low).double()
    batch, prefix, lengths = prefixes(mechanism, "ragged", dtype)
    assert prefix is not None
    x = torch.randn(batch, 9, 32, dtype=dtype, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    y, want = low(x, prefix, prefix_lengths=lengths), exact(x64, prefix.double(), prefix_lengths=lengths)
    g = torch.randn_like(y)
    assert y.dtype == dtype
    assert error(y, want) < TOLERANCE[dtype]
    got = gradients(low, y, g, x)
    assert all(grad.dtype == dtype for grad in got)
    for grad, exact_grad in zip(got, gradients(exact, want, g.double(), x64), strict=True):
        difference = (grad.double() - exact_grad).norm() / exact_grad.norm().clamp(min=1e-3 * exact_grad.numel() ** 0.5)
        assert difference < TOLERANCE[dtype]


@every
def test_trains_under_autocast(mechanism: Mechanism) -> None:
    attention = mechanism.build(dtype=torch.float32)
    batch, prefix, lengths = prefixes(mechanism, "ragged", torch.float32)
    assert prefix is not None
    x = torch.randn(batch, 7, 32, requires_grad=True)
    want = attention(x, prefix, prefix_lengths=lengths)
    with torch.autocast("cpu", torch.bfloat16):
        y = attention(x, prefix, prefix_lengths=lengths)
    assert error(y, want) < TOLERANCE[torch.bfloat16]
    g = torch.randn_like(want)
    for got, exact in zip(gradients(attention, y, g.to(y.dtype), x), gradients(attention, want, g, x), strict=True):
        assert got.dtype == torch.float32
        assert (got - exact).norm() / exact.norm().clamp(min=1e-3 * exact.numel() ** 0.5) < TOLERANCE[torch.bfloat16]


@every
def test_dropout_is_off_in_evaluation_and_right_on_average_in_training(mechanism: Mechanism) -> None:
    if "dropout" not in configured(mechanism.name).attention:
        pytest.skip("has no dropout")
    attention = mechanism.build("task.attention_dropout=0.3")
    x = torch.randn(1, 2 * mechanism.grid + 1, 32, dtype=torch.float64)
    prefix = torch.randn(1, mechanism.grid + 1, 32, dtype=torch.float64)
    want = attention(x, prefix)
    assert torch.equal(want, mechanism.build()(x, prefix))
    draws = 600
    many = attention.train()(x.expand(draws, -1, -1), prefix.expand(draws, -1, -1))
    deviation = many.std(0)
    assert (deviation > 0).all()
    assert ((many.mean(0) - want[0]).abs() < 5 * deviation / draws**0.5).all()
    assert not torch.equal(many[:300], many[300:])


@every
def test_every_weight_learns_with_dropout(mechanism: Mechanism) -> None:
    attention = mechanism.build("task.attention_dropout=0.3", dtype=torch.float32).train()
    batch, prefix, lengths = prefixes(mechanism, "ragged", torch.float32)
    y = attention(torch.randn(batch, 9, 32), prefix, prefix_lengths=lengths)
    (y * torch.randn_like(y)).sum().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 1e-6, name


@every
def test_tables_made_in_inference_serve_training_and_are_no_weights(mechanism: Mechanism) -> None:
    attention = mechanism.make("task.model.d_model=80", "task.attention_heads=4")  # widths that nothing else here uses
    x = torch.randn(1, 6, 80)
    with torch.inference_mode():
        attention(x, x)
        attention.extend(x, attention.new_cache(1, 6))
    attention(x, x).sum().backward()
    assert set(attention.state_dict()) == {name for name, _ in attention.named_parameters()}  # no table among them
