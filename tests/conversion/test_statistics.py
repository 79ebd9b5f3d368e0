"""Statistics of calibration texts against their definitions, and the measured errors of a conversion."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.attention import MHA, SlidingWindow
from attnlab.conversion import ToMLA, layers, statistics
from attnlab.conversion.split import mix, project
from attnlab.conversion.statistics import collect, frequencies_of
from tests.conversion.models import exact, tokens

KINDS: dict[str, dict[str, Any]] = {
    "grouped": {"num_kv_heads": 2, "bias": ["query", "key"]},
    "normed": {"num_kv_heads": 4, "qk_norm": True},
    "part": {"num_kv_heads": 1, "rope_dim": 4},
    "not-turned": {"num_kv_heads": 2, "rope_dim": 0},
    "window": {"num_kv_heads": 2, "window": 7},
    "sinks": {"num_kv_heads": 2, "window": 5, "sinks": 2},
}


def rotated(z: Tensor, theta: Tensor, pairs: int) -> Tensor:
    """z (B, H, T, D): components f and f + F as a complex number times e^(i position theta_f)."""
    angles = torch.arange(z.shape[2], dtype=theta.dtype)[:, None] * theta
    turned = torch.complex(z[..., :pairs], z[..., pairs : 2 * pairs]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, z[..., 2 * pairs :]), -1)


def naive(a: MHA, texts: list[Tensor]) -> dict[str, Tensor]:
    """One position, one head, one key at a time: the formulas in the docstring of `Statistics`."""
    sums: dict[str, Any] = dict.fromkeys(("moment", "mean", "of_query", "energy", "weighted", "spread", "turn"), 0)
    count, pairs, width = 0, a.turned // 2, a.head_dim
    theta, output = frequencies_of(a), a.out.weight.unflatten(1, (a.num_heads, -1)).movedim(1, 0)
    for x in texts:
        q, k, v = (f(x).unflatten(-1, (-1, width)).transpose(1, 2) for f in (a.query, a.key, a.value))
        q, k = a.query_norm(q), a.key_norm(k)
        turned = rotated(q, theta, pairs), rotated(k, theta, pairs)
        for b in range(x.shape[0]):
            for t in range(x.shape[1]):
                y = torch.cat((k[b, :, t].flatten(), v[b, :, t].flatten()))
                sums["moment"], sums["mean"] = sums["moment"] + torch.outer(y, y), sums["mean"] + y
                of_heads: dict[str, list[Tensor]] = {name: [] for name in list(sums)[2:]}
                for h in range(a.num_heads):
                    g, seen = h * a.num_kv_heads // a.num_heads, a.visible(t)
                    logits = torch.stack([turned[0][b, h, t] @ turned[1][b, g, j] for j in seen]) / width**0.5
                    p, values = logits.softmax(0), torch.stack([v[b, g, j] for j in seen])
                    moved = (values - p @ values) @ output[h].mT
                    w = (p.square() * moved.square().sum(-1)).sum()
                    size = q[b, h, t, :pairs].square() + q[b, h, t, pairs : 2 * pairs].square()
                    angles = torch.tensor([float(j - t) for j in seen], dtype=x.dtype)[:, None] * theta
                    of_heads["of_query"].append(w * torch.outer(q[b, h, t], q[b, h, t]))
                    of_heads["energy"].append(size)
                    of_heads["weighted"].append(w * size)
                    of_heads["spread"].append(p.square().sum())
                    of_heads["turn"].append((p[:, None] * torch.polar(torch.ones_like(angles), angles)).sum(0))
                for name, heads in of_heads.items():
                    sums[name] = sums[name] + torch.stack(heads)
                count += 1
    return {name: total / count for name, total in sums.items()}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_sums_over_blocks_are_the_definitions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "QUERIES", 5)
    torch.manual_seed(0)
    options = dict(KINDS[kind])
    made = SlidingWindow if "window" in options else MHA
    attention = made(16, 4, head_dim=8, **{"bias": False, **options}).double().eval()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.4)
    texts = [torch.randn(2, 13, 16, dtype=torch.float64), torch.randn(1, 4, 16, dtype=torch.float64)]
    result, want = collect(attention, texts), naive(attention, texts)
    for name, value in want.items():
        torch.testing.assert_close(getattr(result, name), value, rtol=1e-11, atol=1e-13, msg=f"{name} differs")


@pytest.mark.parametrize("method", ["output_aware", "balanced", "pca", "weights"])
def test_predicted_errors_are_those_of_every_rank(method: Any) -> None:
    torch.manual_seed(0)
    content, size = 5, 11
    moment, weights = torch.randn(size, 40, dtype=torch.float64), torch.randn(size, 7, dtype=torch.float64)
    moment = moment @ moment.mT
    blocks = [torch.randn(n, 9, dtype=torch.float64) for n in (content, size - content)]
    metric = torch.block_diag(*(block @ block.mT for block in blocks))
    result = project(method, moment, metric, content, weights)
    torch.testing.assert_close(result.up @ result.down, torch.eye(size, dtype=torch.float64))
    apart = project(method, moment, metric, content, weights, [content, 0, size - content])
    torch.testing.assert_close(apart.errors, result.errors, rtol=1e-9, atol=1e-9 * float(result.errors[0]))
    for rank in range(size + 1):
        rest = torch.eye(size, dtype=torch.float64) - result.up[:, :rank] @ result.down[:rank]
        want = (metric * (rest @ moment @ rest.mT)).sum()
        torch.testing.assert_close(result.errors[rank], want, rtol=1e-9, atol=1e-9 * float(result.errors[0]))


@torch.no_grad()
@pytest.mark.parametrize(("groups", "method", "kept"), [(1, "score", 0), (1, "score", 2), (2, "uniform", 0)])
def test_the_predicted_error_of_lost_rotations_is_that_of_their_phases(groups: int, method: Any, kept: int) -> None:
    """Half of E w |q|^2 E |k|^2 E |e^(i phi) - m|^2 / D of each component; m is the mean for "score", else 1."""
    torch.manual_seed(0)
    a = MHA(16, 4, head_dim=8, num_kv_heads=groups, bias=False).double().eval()
    x, theta = torch.randn(2, 9, 16, dtype=torch.float64), frequencies_of(a)
    result = collect(a, [x])
    q, k = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (a.query, a.key))
    logits = rotated(q, theta, 4) @ rotated(k, theta, 4).repeat_interleave(4 // groups, 1).mT / 8**0.5
    places = torch.arange(9.0).double()
    p = logits.masked_fill(places > places[:, None], -torch.inf).softmax(-1)  # (B, H, T, T)
    angles = (places - places[:, None])[..., None] * theta
    phase = torch.polar(torch.ones_like(angles), angles)
    mean = torch.einsum("bhtj,tjf->hf", p.to(phase), phase) / 18
    centre = mean if method == "score" else torch.ones_like(mean)
    moved = torch.einsum("bhtj,htjf->hf", p, (phase - centre[:, None, None]).abs().square()) / 18
    keys = (k[..., :4].square() + k[..., 4:].square()).mean((0, 2))  # (G, F)
    lost = (result.weighted * moved).unflatten(0, (groups, -1)).sum(1) * keys / (2 * 8)
    predicted = mix(result, theta, method, 2 * kept).lost
    assert predicted == pytest.approx(float(lost.flatten().sort().values[: lost.numel() - kept].sum()), rel=1e-9)


@torch.no_grad()
def test_the_error_of_weights_is_that_of_their_singular_values() -> None:
    """Of the matrices that make keys and values, with the latent that approximates them best, and at full rank."""
    attention, x = exact("llama").attentions[0], exact("llama").embed(tokens(8, 12), 0)
    assert isinstance(attention, MHA)
    squares = torch.linalg.svdvals(torch.cat((attention.key.weight, attention.value.weight))).square()
    for rank in (8, 31):
        target = ToMLA(rope_dim=0, latent_dim=rank, latent="weights")
        about = target.convert(attention, collect(attention, [x]), lambda: [x]).about
        assert about["weight_error"] == pytest.approx(float(squares[rank:].sum() / squares.sum()), rel=1e-9)


@torch.no_grad()
def test_the_output_error_is_that_of_the_first_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the last layer, which computes these batches alone."""
    import copy

    monkeypatch.setattr(layers, "BATCH", 2)
    monkeypatch.setattr(layers, "MEASURED", 2)
    original = exact("llama")
    texts = tokens(7, 12)
    decoder = copy.deepcopy(original)
    result = layers.convert(decoder, ToMLA(keep=0.5), texts)
    x = decoder.embed(texts[:4], 0)
    for block, old, layer in zip(decoder.blocks, original.blocks, result, strict=True):
        entered = block.attention_norm(x)
        want = old.attention(entered)
        lost = (block.attention(entered) - want).square().sum()
        variance = (want - want.mean((0, 1))).square().sum()
        assert layer.about["output_error"] == pytest.approx(float(lost / variance), rel=1e-9)
        x = block(x, block.attention)
