"""LASER: published ranks, the exact decomposition, names of matrices, refusals."""

import pytest
import torch

from attnlab.compression import compress, densify, outline
from attnlab.compression.decompositions.svd import low_rank, randomised_low_rank
from attnlab.compression.methods.laser import LASER
from attnlab.compression.modules.linear import Fused, LowRankLinear
from attnlab.errors import ConfigError
from attnlab.pretrained import Projection
from tests.compression.llama import llama
from tests.compression.models import layers
from tests.pretrained.tiny import ids, logits, tiny

RATES = (1, 2, 4, 6, 8, 9, 9.5, 9.9, 9.95)
RANKS = {768: (691, 614, 460, 307, 153, 76, 38, 7, 3), 4096: (3686, 3276, 2457, 1638, 819, 409, 204, 40, 20)}


@pytest.mark.parametrize("size", RANKS)
def test_the_published_ranks(size: int) -> None:
    matrix = Projection("mlp", (4 * size, size))
    assert tuple(LASER(rate=rate).rank_for(matrix) for rate in RATES) == RANKS[size]


def test_only_the_named_matrices_change_and_become_their_best_approximation() -> None:
    model, plain = llama(), llama()
    (report,) = compress(model, LASER(layers=[-1], matrices="down", rank=3))
    weight = plain.get_parameter("layers.1.mlp.down_proj.weight").detach().double()
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    module = model.get_submodule("layers.1.mlp.down_proj")
    assert isinstance(module, LowRankLinear)
    torch.testing.assert_close(module.dense()[0][""][0], u[:, :3] * s[:3] @ vh[:3], rtol=0, atol=1e-6)
    assert report["down_error"] == pytest.approx(float(s[3:].norm() / s.norm()))
    changed = {name for name, value in plain.state_dict().items() if name not in model.state_dict()}
    assert changed == {"layers.1.mlp.down_proj.weight"}


def test_exact_beats_randomised_most_where_singular_values_fall_slowly() -> None:
    flat = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    *_, exact = low_rank(flat, 4)
    *_, released = randomised_low_rank(flat, 4)
    assert exact < released < 1
    state = torch.get_rng_state()
    *_, more = randomised_low_rank(flat, 4, iterations=20)
    assert torch.equal(torch.get_rng_state(), state)
    assert exact < more < released
    fast = flat @ torch.diag(0.5 ** torch.arange(64.0))
    assert randomised_low_rank(fast, 4)[2] - low_rank(fast, 4)[2] < 1e-3


@pytest.mark.parametrize("kind", ["gptj", "gpt2", "gpt_neox", "roberta", "llama"])
def test_every_family(kind: str) -> None:
    """The group mlp is the MLP's matrices alone (released: RoBERTa's output projection of attention too)."""
    model, plain, product = tiny(kind), tiny(kind), tiny(kind)
    assert all(report["dense"] for report in compress(product, LASER(rank=4, factorised=False)))
    changed = {n for n, value in product.state_dict().items() if not torch.equal(value, plain.state_dict()[n])}
    places = [layer.projections[name].path for layer in layers(plain) for name in layer.matrices]
    assert changed == {f"{path}.weight" for path in places}
    compress(model, LASER(matrices=["all"], rank=4))
    assert any(isinstance(module, Fused) for module in model.modules()) == (kind in ("gpt2", "gpt_neox"))
    assert logits(densify(model, plain), ids()).sub(logits(model, ids())).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 25, "matrices": "down"}, r"^compress.rank=25: rank 25 for layers.0.mlp.down_proj \(40 x 24\), which"),
        ({"rate": 9.9}, r"^compress.rate=9.9: rank 0 for layers.0.mlp.gate_proj \(24 x 40\), which takes 1 to 24$"),
        ({"rho": 0.01}, r"^compress.rho=0.01: rank 0 "),
        ({"rank": 2, "matrices": ["fc_inn"]}, r"^compress.matrices: layers.0 has no fc_inn; expected one of q, k, v"),
        ({"rank": 3, "rate": 9}, r"^rank=3 and rate=9: give only one of rank, rho, rate and keep$"),
    ],
)
def test_bad_input(options: dict[str, object], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        outline(llama().to("meta"), LASER(**options))  # type: ignore[arg-type]
