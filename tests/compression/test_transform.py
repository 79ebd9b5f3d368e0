"""Complete models: exact at full rank, refused if the algebra does not apply, resumed after an interruption."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from attnlab.compression import Method, compress, outline
from attnlab.compression.methods.cp_slimatt import CPSlimAtt
from attnlab.compression.methods.irratt import IrrAtt
from attnlab.compression.methods.mlp_svd import MLPSVD
from attnlab.compression.methods.query_key import Heads
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.compression.methods.truncatt import GlobalSVD, TruncAtt
from attnlab.errors import ConfigError
from tests.compression.llama import llama
from tests.compression.models import NAMES, compressed, images, layers, vit

FULL: dict[str, Method] = {
    "truncatt": TruncAtt(8, 8, 24),
    "global_svd": GlobalSVD(24, 8, 24),
    "cp_slimatt": CPSlimAtt(24, 8, 24),
    "irratt": IrrAtt(24, 8, 24),
    "irratt identity": IrrAtt(24, 8, fusion="identity"),
    "irratt global": IrrAtt(24, 8, start="global"),
    "irratt values": IrrAtt(24, 8, vo="irratt"),
    "cp_slimatt constrained": CPSlimAtt(24, 8, vo="irratt", fusion="constrained"),
    "mlp_svd": MLPSVD(24),
}
SMALL: dict[str, Method] = {
    "truncatt": TruncAtt(4, 4, 12),
    "global_svd": GlobalSVD(12, 4),
    "cp_slimatt": CPSlimAtt(12, 4, sweeps=20),
    "irratt": IrrAtt(12, 4, sweeps=20),
    "irratt identity": IrrAtt(12, 4, fusion="identity", sweeps=20),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", FULL)
def test_full_rank_is_exact(name: str, method: str) -> None:
    for dtype, error in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        model = vit(name).to(dtype)
        x = images().to(dtype)
        with torch.no_grad():
            expected = model(x)
            reports = compress(model, FULL[method])
            torch.testing.assert_close(model(x), expected, rtol=0, atol=error * max(1.0, float(expected.abs().max())))
    assert all(report.get("qk_error", 0) < 1e-12 for report in reports)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_biases_matter_and_are_kept() -> None:
    model = vit().double()
    attn: Any = model.blocks[0].attn  # type: ignore[index, union-attr]
    heads = Heads.of(model, layers(model)[0])
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    ones = torch.cat([x, torch.ones(2, 5, 1, dtype=torch.float64)], -1)
    y = heads.bias
    for h in range(3):
        logits = (ones @ heads.query[h]) @ (x @ heads.key[h]).mT * heads.scale
        y = y + logits.softmax(-1) @ (x @ heads.value[h]) @ heads.output[h].T
    torch.testing.assert_close(y, attn(x), rtol=1e-12, atol=1e-12)
    without = copy.deepcopy(attn)
    without.qkv.bias.data[:24] = 0
    assert float((without(x) - attn(x)).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("method", SMALL)
def test_training_continues(method: str) -> None:
    model = vit()
    reports = compress(model, SMALL[method])
    assert all(0 < r["qk_error"] < 1 and 0 < r["vo_error"] < 1 for r in reports if r["path"].endswith("attn"))
    model.train()(images()).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_more_of_the_tensor_is_kept_where_ranks_are_shared_out() -> None:
    """At one total rank: global SVD is at most TruncAtt's error, CP at most global SVD's, and so the block terms."""
    errors = {}
    for name, method in SMALL.items():
        reports = compress(vit(), method)
        errors[name] = [r["qk_error"] for r in reports if r["path"].endswith("attn")]
    for i in range(2):
        assert errors["global_svd"][i] <= errors["truncatt"][i] * (1 + 1e-12)
        assert errors["cp_slimatt"][i] <= 1.02 * errors["global_svd"][i]  # the correction may take 2 %
        assert errors["irratt"][i] <= errors["irratt identity"][i] * (1 + 1e-12)
        assert errors["global_svd"][i] <= errors["irratt identity"][i] * (1 + 1e-12)


# --- refusals ---------------------------------------------------------------------------------------------------


def refused(model: nn.Module, method: Method) -> str:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        compress(model, method)
    with pytest.raises(ConfigError, match=r".") as described:
        outline(model, method)
    assert str(described.value) == str(caught.value)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in after)
    return str(caught.value)


def gated() -> nn.Module:
    model = vit()
    model.blocks[1].attn.gate = nn.Linear(24, 24)  # type: ignore[index, union-attr]
    return model


def swin() -> nn.Module:
    sizes: dict[str, Any] = {"depths": (1, 1, 1, 1), "embed_dim": 24, "num_heads": (1, 1, 2, 2)}
    return timm.create_model("swin_tiny_patch4_window7_224", **sizes)


@pytest.mark.parametrize(
    ("make", "method", "message"),
    [
        (lambda: vit(qk_norm=True), TruncAtt(4, 4), "blocks.0.attn: Attention has a norm of queries"),
        (lambda: vit(scale_attn_norm=True), TruncAtt(4, 4), "blocks.0.attn: Attention has a norm of head outputs"),
        (gated, TruncAtt(4, 4), "blocks.1.attn: Attention has a gate"),
        (swin, TruncAtt(4, 4), "WindowAttention is not timm's plain attention"),
        (llama, TruncAtt(4, 4), "layers.0.self_attn: rotary positions"),
        (lambda: compressed(TruncAtt(4, 4)), GlobalSVD(12, 4), "blocks.0.attn is compressed already"),
        (lambda: compressed(TensorLLM(rank=3)), TruncAtt(4, 4), "blocks.0.attn is compressed already"),
        (vit, TruncAtt(9, 4), "rank=9: blocks.0.attn takes 1 to 8"),
        (vit, GlobalSVD(2, 4), "rank=2: blocks.0.attn takes 3 to 24"),
        (vit, IrrAtt(25, 4), "rank=25: blocks.0.attn takes 3 to 24"),
        (vit, CPSlimAtt(25, 4), "rank=25: blocks.0.attn takes 3 to 24"),
        (vit, TruncAtt(4, 9), "compress.vo_rank=9: blocks.0.attn takes 1 to 8"),
        (vit, TruncAtt(4, 4, 25), "compress.mlp_rank=25: blocks.0.mlp.fc1 (24 x 96) takes 1 to 24"),
    ],
)
def test_refusals_leave_the_model_as_it_is(make: Any, method: Method, message: str) -> None:
    assert message in refused(make(), method)


# --- from CP SlimAtt to IrrAtt ----------------------------------------------------------------------------------


def test_a_slim_model_whose_heads_share_no_column_becomes_an_irregular_one_exactly() -> None:
    model = vit().double()
    compress(model, CPSlimAtt(24, 4))  # full rank: its fusion is block-diagonal
    x = images().double()
    with torch.no_grad():
        expected = model(x)
        reports = compress(model, IrrAtt())
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-11)
    assert reports[0]["ranks"] == [8, 8, 8] and reports[0]["fusion_dropped"] < 1e-12
    assert compress(compressed(CPSlimAtt(12, 4, sweeps=5)), IrrAtt())[0]["fusion_dropped"] > 0


# --- the store --------------------------------------------------------------------------------------------------


def test_an_interrupted_compression_continues_from_finished_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = compressed(SMALL["irratt"])
    fitted: list[int] = []
    real = IrrAtt.fit

    def fit(self: IrrAtt, *arguments: Any) -> Any:
        fitted.append(1)
        if len(fitted) == 2:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(IrrAtt, "fit", fit)
    with pytest.raises(KeyboardInterrupt):
        compress(vit(), SMALL["irratt"], tmp_path)
    assert len(list(tmp_path.glob("[!.]*"))) == 1
    model = vit()
    reports = compress(model, SMALL["irratt"], tmp_path)
    assert len(fitted) == 3 and reports[0]["stored"] and "stored" not in reports[1]
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name
    compress(vit(), SMALL["irratt"], tmp_path)
    assert len(fitted) == 3
    compress(vit(), IrrAtt(12, 4, sweeps=19), tmp_path)  # other settings
    other = vit()
    other.blocks[0].attn.qkv.weight.data[0, 0] += 1  # type: ignore[index, union-attr]
    compress(other, SMALL["irratt"], tmp_path)
    assert len(fitted) == 6
    same = vit()  # as in a model that was made deeper by copies of its layers
    same.blocks[1].load_state_dict(same.blocks[0].state_dict())  # type: ignore[index, union-attr]
    assert not any("stored" in report for report in compress(same, SMALL["truncatt"], tmp_path))
