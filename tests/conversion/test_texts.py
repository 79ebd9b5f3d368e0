"""Calibration texts between layers: they are in files, and what is known of them is what would be computed."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnlab.conversion import Conversion, ToMLA, ToMTLA, layers
from attnlab.conversion.texts import Scratch
from attnlab.errors import WriteError
from tests.conversion.models import exact, tokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_read_is_what_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "new")
    values = {number: torch.randn(2, 3, 4).to(dtype) for number in (5, 0)}
    for number, value in values.items():
        scratch[number] = value.transpose(0, 1)
    scratch[5] = values[5] = torch.randn(7, 1).to(dtype)
    scratch[0] = values[0]
    for number, value in values.items():
        assert number in scratch and torch.equal(scratch[number], value)
    assert not list((tmp_path / "new").iterdir())  # nothing is left of a process that is killed
    scratch.clear()
    assert 5 not in scratch
    scratch[1] = values[0]
    assert torch.equal(scratch[1], values[0])
    scratch.close()


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: Path("/dev/full").open("wb"))  # noqa: SIM115
    scratch = Scratch(tmp_path)
    message = rf"^{tmp_path}: cannot be written \(hidden states of the calibration texts: No space .*\); disk full$"
    with pytest.raises(WriteError, match=message):
        scratch[0] = torch.zeros(9)
    monkeypatch.undo()
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="file: cannot be written"):
        Scratch(tmp_path / "file")


@pytest.mark.parametrize(
    "target",
    [pytest.param(ToMLA(keep=0.4), marks=pytest.mark.slow), ToMTLA(keep=0.4)],
    ids=lambda target: target.name,
)
@torch.no_grad()
def test_neither_pieces_nor_what_is_known_change_a_conversion(
    target: Conversion, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results: list[tuple[Tensor, Tensor]] = []
    for known, piece in ((True, 2), (True, 1), (False, 2)):
        monkeypatch.setattr(layers, "BATCH", 2)
        monkeypatch.setattr(layers, "PIECE", piece)
        if not known:  # all is computed again
            monkeypatch.setattr(Scratch, "__contains__", lambda *_: False)
        decoder = copy.deepcopy(exact("llama"))
        converted = layers.convert(decoder, target, tokens(9, 12), tmp_path / str(len(results)))
        about = torch.tensor([layer.about["output_error"] for layer in converted])
        results.append((decoder(tokens(2, 12, seed=2)), about))
    for logits, about in results[1:]:
        torch.testing.assert_close(logits, results[0][0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(about, results[0][1], rtol=1e-8, atol=1e-12)
