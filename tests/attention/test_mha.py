"""Multi-head attention with the options of pretrained models: against the equations, and against transformers."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnlab.attention import MHA, Attention, Llama3Scaling, SlidingWindow
from attnlab.attention.ops.rope import rotary_table
from tests.attention.mechanisms import check_equations, error, extend_by

SCALING = Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen2": {"bias": ["query", "key", "value"]},
    "qwen3": {"bias": False, "qk_norm": True},
    "llama3": {"bias": False, "rope_scaling": SCALING, "rope_theta": 500.0},
    "all": {"bias": ["out"], "qk_norm": True, "rope_scaling": SCALING},
}


def randomised(attention: Attention) -> Attention:
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn_like(parameter) * (1.0 if parameter.dim() < 2 else 0.3))
    return attention.double().eval()


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("window", [None, 4])
def test_options_equal_the_equations_forward_backward_and_cached(option: str, groups: int, window: int | None) -> None:
    more = OPTIONS[option]
    made = MHA(32, 4, groups, **more) if window is None else SlidingWindow(32, 4, groups, window=window, **more)
    check_equations(randomised(made), 9, torch.tensor([5, 2]), [[1] * 9, [9], [3, 1, 5]])


@pytest.mark.parametrize(
    ("bias", "biased"),
    [
        (True, {"query", "key", "value", "out"}),
        (False, set()),
        (["query", "key", "value"], {"query", "key", "value"}),
        (["out"], {"out"}),
        ([], set()),
    ],
)
def test_biases_of_each_projection(bias: Any, biased: set[str]) -> None:
    attention = MHA(8, 2, bias=bias)
    names = {name.partition(".")[0] for name, _ in attention.named_parameters() if name.endswith("bias")}
    assert names == biased


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(MHA, 32, 4, bias=("query", "keys")), "keys is not one of query, key, value, out"),  # type: ignore[arg-type]
        (partial(MHA, 32, 4, num_kv_heads=3), "3 does not divide 4"),
        (partial(MHA, 32, 4, head_dim=7), "head_dim must be even"),
        (partial(Llama3Scaling, factor=0.5), "factor=0.5, .* expected at least 1"),
        (partial(Llama3Scaling, original_max_position_embeddings=0), "expected at least 1"),
        (partial(Llama3Scaling, low_freq_factor=4.0), "expected 0 < low_freq_factor < high_freq_factor"),
    ],
)
def test_what_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    """By hand: with L = 16 a wave of 2 stays, one of 32 takes factor 4, one of 8 (2 turns) is a third of the way."""
    waves = torch.tensor([2.0, 4.0, 8.0, 16.0, 32.0], dtype=torch.float64)
    scaled = SCALING(2 * torch.pi / waves) / (2 * torch.pi / waves)
    want = torch.tensor([1.0, 1.0, 1 / 3 + 2 / 3 / 4, 0.25, 0.25], dtype=torch.float64)
    assert error(scaled, want) < 1e-14


FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, {"bias": False}),
    "llama3": (
        "llama",
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
        {
            "bias": False,
            "rope_theta": 500000.0,
            "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, original_max_position_embeddings=64),
        },
    ),
    "qwen2": ("qwen2", "Qwen2", {}, {"bias": ["query", "key", "value"]}),
    "qwen3": ("qwen3", "Qwen3", {"rms_norm_eps": 1e-6}, {"bias": False, "qk_norm": True}),
}  # fmt: skip


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str, groups: int) -> None:
    """The same weights under other names; transformers makes its tables in float32."""
    transformers = pytest.importorskip("transformers")
    folder, prefix, of_transformers, of_attnlab = FAMILIES[family]
    module = getattr(transformers.models, folder)
    model = __import__(f"{module.__name__}.modeling_{folder}", fromlist=["_"])
    config = getattr(transformers, f"{prefix}Config")(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=groups, head_dim=16, max_position_embeddings=256,
        **of_transformers,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    published: nn.Module = getattr(model, f"{prefix}Attention")(config, 0).double().eval()
    rotary = getattr(model, f"{prefix}RotaryEmbedding")(config)
    attention = MHA(64, 4, groups, 16, **of_attnlab).double()
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out", "q_norm": "query_norm"}
    names["k_norm"] = "key_norm"
    with torch.no_grad():
        for parameter in published.parameters():
            parameter.copy_(torch.randn_like(parameter) * (1.0 if parameter.dim() < 2 else 0.2))
    state = {".".join([names[name.split(".")[0]], name.split(".")[1]]): v for name, v in published.state_dict().items()}
    attention.load_state_dict(state)
    x = torch.randn(2, 100, 64, dtype=torch.float64)
    cos, sin = rotary(x, torch.arange(100)[None])
    want: Tensor = published(x, position_embeddings=(cos, sin), attention_mask=None)[0]
    assert error(attention(x), want) < 1e-4
    assert attention.rope_theta is not None
    actual = rotary_table(16, attention.rope_theta, 100, torch.float64, x.device, attention.rope_scaling)
    assert (actual[0] - cos[0, :, :8]).abs().max() < 1e-5 and (actual[1] - sin[0, :, :8]).abs().max() < 1e-5
    cache = attention.new_cache(2, 100)
    assert error(extend_by(attention, x, cache, [90, *[1] * 10]), want) < 1e-4
