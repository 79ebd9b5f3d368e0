"""A compressed model on disk, and back to a dense one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import SafetensorError
from torch import nn

from attnlab.compression import Method, compress, densify, load, save
from attnlab.compression.methods.cp_slimatt import CPSlimAtt
from attnlab.compression.methods.irratt import IrrAtt
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.compression.methods.truncatt import TruncAtt
from attnlab.errors import ConfigError, DataError, WriteError
from tests.compression.models import NAMES, OPTIONS, compressed, images, vit

METHODS = {
    "truncatt": TruncAtt(4, 4, 12),
    "cp_slimatt": CPSlimAtt(10, 4, sweeps=3),
    "irratt": IrrAtt(12, 4, sweeps=3),
    "values": IrrAtt(12, 4, sweeps=3, vo="irratt", fusion="identity"),
    "constrained": CPSlimAtt(10, 4, sweeps=3, fusion="constrained"),
    "tensorllm": TensorLLM(ranks=[10, 5]),
}


def saved(folder: Path, method: Method, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = vit().to(dtype)
    compress(model, method)
    save(model, folder, NAMES[0], OPTIONS, {"why": "a test"})
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_a_folder_gives_the_model_back_to_the_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = saved(tmp_path, METHODS[name], dtype)
    again = load(tmp_path)
    x = images().to(dtype)
    assert torch.equal(again(x), model(x))
    assert next(again.parameters()).dtype == dtype


def test_a_folder_has_one_complete_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new model replaces the earlier one, which a full disk leaves."""
    saved(tmp_path, METHODS["tensorllm"])
    model = saved(tmp_path, METHODS["truncatt"])
    files = sorted(file.name for file in tmp_path.iterdir())
    assert len(files) == 2
    for error in (OSError(28, "No space left on device"), SafetensorError("No space left on device (os error 28)")):

        def full(tensors: dict[str, torch.Tensor], file: Path, error: Exception = error) -> None:
            file.write_bytes(b"a part")
            raise error

        monkeypatch.setattr("attnlab.compression.folder.save_file", full)
        with pytest.raises(WriteError, match=r"cannot be written \(.*No space left on device"):
            saved(tmp_path, METHODS["values"])
        assert sorted(file.name for file in tmp_path.iterdir()) == files
    assert torch.equal(load(tmp_path)(images()), model(images()))


ATTN = "blocks.0.attn"
LAYOUT = {"kind": "factored", "dim": 24, "ranks": [4, 4, 4], "value_ranks": [4, 4, 4], "scale": 8**-0.5}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another format": ({"format": 2}, "format: .*2"),
    "no modules": ({"modules": None}, "modules: expected dict, got None"),
    "weights that are a number": ({"weights": 5}, "weights: expected str, got 5"),
    "a digest that is a number": ({"sha256": 7}, "sha256: expected str, got 7"),
    "another digest": ({"sha256": "0"}, "damaged"),
    "an unknown model": ({"model": "vit_of_nobody"}, "do not make a model"),
    "no such weights": ({"weights": "weights-none.safetensors"}, "cannot be read"),
    # sizes that contradict the tensors
    "another depth": ({"options": {**OPTIONS, "depth": 3}}, "do not make a model: .*blocks.2"),
    "another rank": ({"modules": {ATTN: {**LAYOUT, "ranks": [5, 4, 4]}}}, "blocks.0.attn"),
    "another width": ({"modules": {ATTN: {**LAYOUT, "dim": 25}}}, "blocks.0.attn"),
    "a huge rank": ({"modules": {ATTN: {**LAYOUT, "ranks": [10**12, 4, 4]}}}, "do not make a model"),
    "a head twice": ({"modules": {ATTN: {**LAYOUT, "heads": [0, 0, 1]}}}, "heads"),
    "a matrix of other sizes": (
        {"modules": {"blocks.0.mlp.fc1": {"kind": "linear", "dim": 24, "rank": 3, "out_dim": 95}}},
        "do not make a model: .*size mismatch",
    ),
    # what would import, call or read something else
    "a function as a module": ({"modules": {ATTN: {"kind": "os.system", "command": "touch /tmp/x"}}}, "os.system"),
    "a class of torch as a module": ({"modules": {ATTN: {"kind": "torch.nn.Linear"}}}, "torch.nn.Linear"),
    "a module without a kind": ({"modules": {ATTN: {}}}, "kind None"),
    "a module that is a text": ({"modules": {ATTN: "os.system"}}, "do not make a model"),
    "a scale that is a text": ({"modules": {ATTN: {**LAYOUT, "scale": "x"}}}, "scale='x': expected float"),
    "an argument that no module has": ({"modules": {ATTN: {**LAYOUT, "hook": "os.system"}}}, "hook"),
    "an absolute path": ({"weights": "/etc/passwd"}, "weights: .*/etc/passwd"),
    "a path upwards": ({"weights": "../other/weights.safetensors"}, "weights: expected a file of this folder"),
    "the folder above": ({"weights": ".."}, "weights: expected a file of this folder"),
    "a link out": ({"weights": "link.safetensors"}, "weights: expected a file of this folder"),
    "a dtype that is a function": ({"dtype": "load"}, "dtype: .*load"),
    "integers": ({"dtype": "int8"}, "dtype: .*int8"),
    "a file to unpickle": ({"options": {**OPTIONS, "checkpoint_path": "x.pth"}}, "'checkpoint_path' .* is unknown"),
    "a model of the hub": ({"model": "hf-hub:somebody/model"}, "timm has no such model"),
    "a folder's model": ({"model": "local-dir:/tmp"}, "timm has no such model"),
    "another family": ({"family": "torch.hub"}, "family: expected one of"),
    "a family that is a list": ({"family": []}, "family: expected one of"),
}


@pytest.fixture(scope="module")
def truncated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("truncated")
    saved(folder, METHODS["truncatt"])
    return folder


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_manifest_is_one_line(name: str, truncated: Path, tmp_path: Path) -> None:
    folder = tmp_path / "compressed"
    shutil.copytree(truncated, folder)
    (tmp_path / "outside.safetensors").write_bytes(next(folder.glob("weights-*")).read_bytes())
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    change, message = WRONG[name]
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("value", "message"), [(torch.nan, "NaN or infinite"), (None, "dtype int32")])
def test_weights_that_are_no_numbers(value: float | None, message: str, tmp_path: Path) -> None:
    model = saved(tmp_path, METHODS["truncatt"])
    head: Any = model.head
    weight = head.weight.detach()
    head.weight = nn.Parameter(weight.int() if value is None else weight * value, requires_grad=False)
    save(model, tmp_path, NAMES[0], OPTIONS)
    with pytest.raises(DataError, match=rf"weights-\w+.safetensors: head.weight has .*{message}"):
        load(tmp_path)


def test_damage_and_absence_are_one_line(truncated: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"manifest.json: cannot be read"):
        load(tmp_path)
    shutil.copytree(truncated, tmp_path, dirs_exist_ok=True)
    (weights,) = tmp_path.glob("weights-*")
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        load(tmp_path)
    for text in ("{", "{}", "[]"):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(DataError, match=r"manifest.json"):
            load(tmp_path)


@pytest.mark.parametrize("name", ["truncatt", "values"])
def test_a_dense_state_dict_computes_the_same(name: str) -> None:
    model = compressed(METHODS[name]).double()
    dense = timm.create_model(NAMES[0], **OPTIONS).double().eval()
    assert densify(model, dense) is dense
    torch.testing.assert_close(dense(images().double()), model(images().double()), rtol=0, atol=1e-11)


def test_a_model_that_no_dense_head_can_compute_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    model, slim = compressed(CPSlimAtt(20, 8, sweeps=3)), compressed(CPSlimAtt(8, 4, sweeps=3))
    dense = timm.create_model(NAMES[0], **OPTIONS).eval()
    with pytest.raises(ConfigError, match="mix to a higher rank than a dense head"):
        densify(model, dense)
    densify(model, dense, exact=False)
    assert "not exact, relative error" in caplog.text
    densify(slim, dense)  # rank 8: every head's matrix fits
    torch.testing.assert_close(dense(images()), slim(images()), rtol=0, atol=1e-3)
