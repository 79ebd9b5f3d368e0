"""Steps of few rows on a CPU by the C++ library, against the same steps by torch."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from attnlab.attention import MHA, MLA, MTLA, TPA, MLAWindow, SlidingWindow
from attnlab.attention.ops.backends import Backend, noting, prefer, used
from attnlab.attention.ops.native import RoundedLinear, library, linear, round_weights
from attnlab.models import T6, Decoder
from tests.attention.mechanisms import error

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
MADE = {
    "mha": lambda: MHA(40, 4, head_dim=10),
    "gqa": lambda: MHA(64, 8, 2, bias=False),
    "unrotated": lambda: MHA(40, 2, rope_dim=0),
    "window": lambda: SlidingWindow(64, 4, window=4),
    "mla": lambda: MLA(64, 4),
    "mla without rotation": lambda: MLA(40, 4, rope_dim=0, norm="rms"),
    "mla window": lambda: MLAWindow(64, 4, window=4),
    "mtla": lambda: MTLA(72, 6, stride=3),
    "mtla with a wide gate": lambda: MTLA(64, 4, latent_dim=4, gate_dim=99),
    "tpa": lambda: TPA(72, 6, output_norm=True),
}


class Doubled(MHA):
    def _join(self, out_bhtd: torch.Tensor) -> torch.Tensor:
        return 2 * super()._join(out_bhtd)


def freeze(layer: nn.Linear) -> None:
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)


CHANGES: dict[str, Callable[[MHA], object]] = {
    "another layer": lambda a: setattr(a, "query", nn.Linear(40, 40)),
    "another parameter": lambda a: setattr(a.value, "weight", nn.Parameter(torch.randn(40, 40))),
    "other memory": lambda a: a.double().float().key.weight.mul_(2),
    "assigned": lambda a: a.load_state_dict({name: t + 1 for name, t in a.state_dict().items()}, assign=True),
    "a strided bias": lambda a: setattr(a.out, "bias", nn.Parameter(torch.randn(80)[::2])),
    "a hook": lambda a: a.out.register_forward_hook(lambda module, inputs, out: 2 * out),
    "8 bits": round_weights,
    "a buffer": lambda a: freeze(a.out),
}


@pytest.mark.parametrize("rows", [1, 3, 9, 20])
@pytest.mark.parametrize("name", MADE)
def test_steps_equal_those_of_torch(name: str, rows: int) -> None:
    torch.manual_seed(0)
    attention = MADE[name]().eval()
    few, plain = (attention.new_cache(rows, 9) for _ in range(2))
    with torch.no_grad():
        for _ in range(9):
            x = torch.randn(rows, 1, attention.d_model)
            with noting() as pairs:
                step = attention.extend(x, few)
            with prefer(Backend.PLAIN):
                assert error(step, attention.extend(x, plain)) < 1e-5
            few = copy.copy(few)  # a copy has buffers of its own
            assert "NATIVE" in used(pairs)["step"]
            next(p for p in attention.parameters() if p.dim() > 1).mul_(1.1)  # weights that change in place


@torch.no_grad()
@pytest.mark.parametrize("size", [(48, 33), (160, 70), (21, 64), (2048, 20)])
@pytest.mark.parametrize("dtype", [None, torch.int8, torch.bfloat16])
def test_products_of_every_number_of_rows_equal_those_of_torch(
    size: tuple[int, int], dtype: torch.dtype | None
) -> None:
    layer: nn.Linear = nn.Linear(*size)
    layer = RoundedLinear(layer.weight, layer.bias, dtype) if dtype else layer
    for rows in (*range(1, 27), 50, 63, 64):
        x = torch.randn(rows, size[0])
        with noting() as pairs:
            assert error(linear(layer, x), x @ layer.weight.mT + layer.bias) < 1e-5
        assert used(pairs) == {"products of few rows": ["NATIVE"]}
    with noting() as pairs:
        linear(layer, torch.randn(65, size[0]))
    assert not used(pairs)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [None, (7, 2), (1, 7)])
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("name", MADE)
def test_steps_after_prefixes_equal_those_of_torch(name: str, beam: int, lengths: tuple[int, int] | None) -> None:
    torch.manual_seed(0)
    attention = MADE[name]().eval()
    few, plain = (attention.new_cache(2 * beam, 8, 7, prefix_batch=2) for _ in range(2))
    prefix = torch.randn(2, 7, attention.d_model)
    for cache in (few, plain):
        attention.read_prefix(prefix, None if lengths is None else torch.tensor(lengths), cache)
    for t in range(8):
        x = torch.randn(2 * beam, 1, attention.d_model)
        with noting() as pairs:
            step = attention.extend(x, few)
        with prefer(Backend.PLAIN):
            assert error(step, attention.extend(x, plain)) < 1e-5
        assert "NATIVE" in used(pairs)["step"]
        rows = torch.randint(beam, (2, beam)) + torch.tensor([[0], [beam]])
        few.reorder(rows.flatten())
        plain.reorder(rows.flatten())
        if t == 5:  # the second sentence is finished
            few.select(torch.tensor([0, 0]))
            plain.select(torch.tensor([0, 0]))


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_layer_computes_with_what_it_has(change: str) -> None:
    torch.manual_seed(0)
    attention, x = MHA(40, 4).eval(), torch.randn(2, 2, 40)
    cache = attention.new_cache(2, 2)
    with torch.no_grad():
        attention.extend(x[:, :1], cache)
        CHANGES[change](attention)
        plain = copy.copy(cache)
        step = attention.extend(x[:, 1:], cache)
        with prefer(Backend.PLAIN):
            assert error(step, attention.extend(x[:, 1:], plain)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_cache_keeps_the_lengths_that_it_read(dtype: torch.dtype) -> None:
    attention, x, prefix = MTLA(32, 4, stride=3).eval(), torch.randn(2, 4, 32), torch.randn(2, 7, 32)
    lengths, cache = torch.tensor([7, 2], dtype=dtype), attention.new_cache(2, 4, 7)
    want = attention(x, prefix, prefix_lengths=lengths)
    attention.read_prefix(prefix, lengths, cache)
    lengths.fill_(1)  # of the next batch
    assert error(torch.cat([attention.extend(one, cache) for one in x.split(1, 1)], 1), want) < 1e-5


@torch.no_grad()
def test_a_changed_copy_continues_a_text_with_its_own_weights() -> None:
    attention, x = MHA(40, 4).eval(), torch.randn(2, 2, 40)
    cache, other = attention.new_cache(2, 2), copy.deepcopy(attention)
    attention.extend(x[:, :1], cache)
    other.out.weight.mul_(2)
    plain = copy.copy(cache)
    step = other.extend(x[:, 1:], cache)
    with prefer(Backend.PLAIN):
        assert error(step, other.extend(x[:, 1:], plain)) < 1e-5


@torch.no_grad()
def test_a_subclass_decodes_by_its_own_methods() -> None:
    attention, x = Doubled(40, 4).eval(), torch.randn(1, 3, 40)
    cache = attention.new_cache(1, 3)
    assert error(torch.cat([attention.extend(one, cache) for one in x.split(1, 1)], 1), attention(x)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("change", ["weights of the norm", "a hook of the norm", "the attention's dtype"])
def test_a_block_that_the_library_cannot_read_is_computed_by_torch(change: str) -> None:
    block = Decoder(20, 32, lambda _: MHA(32, 2), num_layers=1, ffn_dim=32).eval().blocks[0]
    if change == "weights of the norm":
        block.mlp_norm.weight = nn.Parameter(torch.randn(64)[::2])
    elif change == "a hook of the norm":
        block.mlp_norm.register_forward_hook(lambda module, inputs, out: 2 * out)
    x, more = torch.randn(2, 1, 32), torch.randn(1, 1, 32, dtype=torch.bfloat16).expand(2, 1, 32)
    more = more if change == "the attention's dtype" else more.float()
    step = block(x, lambda _: more)
    with prefer(Backend.PLAIN):
        assert error(step, block(x, lambda _: more)) < 1e-5


@torch.no_grad()
def test_an_input_of_another_width_is_refused() -> None:
    for layer in (nn.Linear(32, 8), RoundedLinear(torch.randn(8, 32))):
        with pytest.raises(RuntimeError):
            linear(layer, torch.randn(1, 31))


@torch.no_grad()
def test_weights_in_bfloat16_give_the_same_steps_as_their_values_in_float32() -> None:
    torch.manual_seed(0)
    model = Decoder(50, 64, lambda _: MHA(64, 4, 2), num_layers=2, ffn_dim=90).eval()
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    tokens = torch.randint(50, (2, 1))
    want = model.step(tokens, model.start(2, 6))
    round_weights(model, torch.bfloat16)
    with noting() as pairs:
        assert error(model.step(tokens, model.start(2, 6)), want) < 1e-6
    assert used(pairs)["step"] == ["NATIVE"]
    assert model.blocks[0].up.codes.nbytes == 2 * 64 * 90
    for other in (torch.float64, torch.float16):  # computed by torch
        layer = RoundedLinear(torch.randn(8, 32), None, torch.bfloat16).to(other)
        assert linear(layer, torch.randn(1, 32, dtype=other)).dtype is other


@pytest.mark.parametrize("make", [T6, Decoder])
def test_a_model_is_the_same_and_with_weights_of_8_bits_close(make: type[Decoder]) -> None:
    torch.manual_seed(0)
    options = {"output_init": "default"} if make is T6 else {"tied": False}
    model = make(50, 64, lambda _: MTLA(64, 4), num_layers=2, ffn_dim=90, **options).eval()
    text = torch.randint(50, (2, 6))

    def steps(model: Decoder) -> torch.Tensor:
        caches = model.start(2, 6)
        return torch.cat([model.step(token, caches) for token in text.split(1, 1)], 1)

    want = model(text).detach()
    assert error(steps(model), want) < 1e-5
    round_weights(model)
    rounded = model(text).detach()
    assert 1e-5 < error(rounded, want) < 0.05
    assert error(steps(model), rounded) < 1e-5


def test_a_hook_is_called_and_a_gradient_is_kept() -> None:
    layer = Decoder(20, 32, lambda _: MHA(32, 2), num_layers=1, ffn_dim=32).eval()
    seen: list[int] = []
    layer.blocks[0].up.register_forward_hook(lambda *_: seen.append(1))
    layer.step(torch.zeros(1, 1, dtype=torch.long), layer.start(1, 2))
    assert seen
    layer(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    assert layer.blocks[0].gate.weight.grad is not None
