"""TRAWL: the stacks of each mode, both decompositions on planted tensors, refusals."""

from typing import Any

import pytest
import torch
from torch import nn

from attnlab.compression import compress, densify, outline
from attnlab.compression.counting import parameters
from attnlab.compression.methods.trawl import TRAWL
from attnlab.errors import ConfigError
from attnlab.pretrained import family_of
from tests.compression.llama import SIZES, Llama, LlamaFamily, llama, words
from tests.compression.models import vit
from tests.pretrained.tiny import ids, logits, tiny


@pytest.mark.parametrize(
    ("mode", "counts"), [(1, [40]), (2, [4] * 10), (3, [16, 12, 12]), (4, [20]), (5, [2] * 10), (6, [8, 6, 6])]
)
def test_the_stacks_of_the_modes(mode: int, counts: list[int]) -> None:
    with torch.device("meta"):
        model = vit(depth=10)
    result = TRAWL(mode=mode).stacks(model, family_of(model).layers(model))
    assert [len(stack.matrices) for stack in result] == counts
    places = [place for stack in result for place in stack.matrices]
    assert len(places) == len(set(places)) == sum(counts)
    assert {stack.shape for stack in result} == ({(24, 24)} if mode <= 3 else {(96, 24)})


def test_thirds_of_28_layers() -> None:
    with torch.device("meta"):
        gptj = Llama(**{**SIZES, "depth": 28})
    thirds = TRAWL(mode=6).stacks(gptj, LlamaFamily().layers(gptj))
    assert [len(stack.matrices) // 3 for stack in thirds] == [10, 9, 9]


def planted(model: nn.Module, rank: int, method: str, layer: int = 1) -> None:
    """The MLP of a layer, of shared row and column spaces; down is stacked as its transpose."""
    generator = torch.Generator().manual_seed(3)
    b, c = (torch.randn(size, rank, generator=generator, dtype=torch.float64) for size in (40, 24))
    with torch.no_grad():
        for name in ("gate", "up", "down"):
            core = torch.randn(rank, rank, generator=generator, dtype=torch.float64)
            weight = b @ (core if method == "tucker" else core.diagonal().diag()) @ c.T
            target = model.get_parameter(f"layers.{layer}.mlp.{name}_proj.weight")
            target.copy_(weight.T if name == "down" else weight)


def test_a_cp_decomposition_starts_from_the_largest_singular_values() -> None:
    """Of the three matrices together; a smaller rank than their number starts at random."""
    model = llama().double()
    weights = [model.get_parameter(f"layers.1.mlp.{name}_proj.weight").detach() for name in ("gate", "up", "down")]
    squares = torch.cat([torch.linalg.svdvals(weight).square() for weight in weights]).sort(descending=True).values
    (report,) = compress(model, TRAWL(layers=[-1], method="cp", rank=9, sweeps=2))
    assert report["history"][0] == pytest.approx(float((squares[9:].sum() / squares.sum()).sqrt()), rel=1e-6)
    assert compress(llama(), TRAWL(layers=[-1], method="cp", rank=2, sweeps=2))[0]["history"][0] > 0.99


def test_the_default_rank_is_a_tenth_of_the_smaller_side() -> None:
    (report,) = compress(llama(dim=60), TRAWL(layers=[-1], sweeps=1))  # matrices of 60 x 40
    assert report["ranks"] == 4


@pytest.mark.parametrize("method", ["cp", "tucker"])
def test_a_planted_tensor_is_found(method: str) -> None:
    model, plain = llama().double(), llama().double()
    planted(model, 3, method)
    plain.load_state_dict(model.state_dict())
    (report,) = compress(model, TRAWL(layers=[-1], method=method, rank=3, sweeps=500, tolerance=1e-12))  # type: ignore[arg-type]
    assert report["error"] < 1e-6 and report["dense"] == []
    torch.testing.assert_close(model(words()), plain(words()), rtol=1e-4, atol=1e-4)
    assert parameters(model)["total"] == parameters(plain)["total"] - 3 * (40 * 24 - 3 * 64)


def test_a_stack_rank_squeezes() -> None:
    """The released rank 2 on a mode of 3 loses information, the full rank does not."""
    reports = []
    for stack_rank in (None, 3, 2):
        model = llama().double()
        planted(model, 4, "tucker")
        reports += compress(model, TRAWL(layers=[-1], method="tucker", rank=4, stack_rank=stack_rank))
    free, full, squeezed = (report["error"] for report in reports)
    assert free < 1e-6 and full < 1e-6 and squeezed > 0.1


@pytest.mark.parametrize(("kind", "mode"), [("gptj", 2), ("gpt2", 1), ("gpt_neox", 5), ("roberta", 6), ("llama", 4)])
def test_families(kind: str, mode: int) -> None:
    model, plain = tiny(kind), tiny(kind)
    compress(model, TRAWL(mode=mode, rank=3, sweeps=5))
    assert parameters(model)["total"] < parameters(plain)["total"]
    assert logits(densify(model, plain), ids()).sub(logits(model, ids())).abs().max() < 1e-4


def test_a_budget_goes_where_the_singular_values_are() -> None:
    model, plain = llama(), llama()
    planted(model, 6, "tucker", layer=0)
    planted(model, 2, "tucker", layer=1)
    reports = compress(model, TRAWL(method="tucker", keep=0.6))
    assert [report["ranks"] for report in reports] == [6, 2]
    assert all(report["error"] < 1e-5 for report in reports)
    assert parameters(plain)["total"] - parameters(model)["total"] == 6 * 24 * 40 - 8 * 3 * 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 25}, "compress.rank=25: layers.0.mlp has matrices 40 x 24"),
        ({"mode": 2}, "compress.mode=2: .* layers.0 has q 48 x 24"),
        ({"layers": [7]}, "compress.layers: 7: expected 0 to 1"),
        ({"method": "tucker", "stack_rank": 4, "rank": 2}, "compress.stack_rank=4: layers.0.mlp takes 1 to 3"),
        ({"stack_rank": 2}, "stack_rank=2: belongs to method=tucker"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        outline(llama().to("meta"), TRAWL(**options))


def test_a_square_mlp_is_stacked_by_the_names_of_its_matrices() -> None:
    """The transpose of fc_out is stacked, also at equal sizes."""
    from attnlab.pretrained import huggingface

    sizes = {"model_type": "gptj", "n_embd": 32, "n_inner": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4}
    model = huggingface.create("tiny", {**sizes, "vocab_size": 40, "n_positions": 16})
    (stack,) = TRAWL(mode=5).stacks(model, family_of(model).layers(model))
    assert [name for _, name in stack.turned] == ["fc_out"]
    first, second = stack.read(model)
    torch.testing.assert_close(first.float(), model.get_parameter("transformer.h.0.mlp.fc_in.weight"))
    torch.testing.assert_close(second.float(), model.get_parameter("transformer.h.0.mlp.fc_out.weight").T)
