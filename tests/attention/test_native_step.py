"""Steps of few rows on a CPU by the C++ library, against the same steps by torch."""

import copy

import pytest
import torch

from attnlab.attention import MHA, MLA, MTLA, TPA, MLAWindow, SlidingWindow
from attnlab.attention.ops.backends import Backend, noting, prefer, used
from attnlab.attention.ops.native import library, round_weights
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
    "tpa": lambda: TPA(72, 6, output_norm=True),
}


@pytest.mark.parametrize("rows", [1, 3, 8])
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
