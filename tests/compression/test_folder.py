"""A compressed model on disk, and back to a dense one."""

import json
import shutil
import subprocess
import sys
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
from attnlab.compression.methods.truncatt import TruncAtt
from attnlab.errors import ConfigError, DataError, WriteError
from tests.compression.models import NAMES, OPTIONS, images, vit

METHODS = {
    "truncatt": TruncAtt(4, 4, 12),
    "cp_slimatt": CPSlimAtt(10, 4, sweeps=10),
    "irratt": IrrAtt(12, 4, sweeps=10),
    "identity": IrrAtt(12, 4, sweeps=10, fusion="identity"),
    "values": IrrAtt(12, 4, sweeps=10, vo="irratt"),
    "constrained": CPSlimAtt(10, 4, sweeps=10, vo="irratt", fusion="constrained"),
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


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    saved(tmp_path, METHODS["truncatt"])
    model = saved(tmp_path, METHODS["irratt"])
    assert len(list(tmp_path.iterdir())) == 2
    assert torch.equal(load(tmp_path)(images()), model(images()))


def test_a_full_disk_leaves_the_earlier_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(tmp_path, METHODS["truncatt"])
    before = sorted(file.name for file in tmp_path.iterdir())
    for error in (OSError(28, "No space left on device"), SafetensorError("No space left on device (os error 28)")):

        def full(tensors: dict[str, torch.Tensor], file: Path, error: Exception = error) -> None:
            file.write_bytes(b"a part")
            raise error

        monkeypatch.setattr("attnlab.compression.folder.save_file", full)
        with pytest.raises(WriteError, match=r"cannot be written \(.*No space left on device"):
            saved(tmp_path, METHODS["irratt"])
        assert sorted(file.name for file in tmp_path.iterdir()) == before
    assert torch.equal(load(tmp_path)(images()), model(images()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2, expected 1"),
        ({"modules": None}, "modules: expected dict, got None"),
        ({"weights": 5}, "weights: expected str, got 5"),
        ({"weights": None}, "weights: expected str, got None"),
        ({"sha256": 7}, "sha256: expected str, got 7"),
        ({"family": []}, r"family: expected one of .*, got \[\]"),
        (
            {"options": {**OPTIONS, "checkpoint_path": "x.pth"}},
            "the option 'checkpoint_path' of manifest.json is unknown; expected only",
        ),
        ({"options": {**OPTIONS, "pretrained_cfg": {}}}, "the option 'pretrained_cfg' of manifest.json is unknown"),
        ({"model": "vit_of_nobody"}, "do not make a model"),
        ({"weights": "weights-none.safetensors"}, "cannot be read"),
        ({"sha256": "0"}, "damaged"),
        ({"options": {**OPTIONS, "depth": 3}}, "do not make a model"),
    ],
)
def test_a_wrong_manifest_is_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(tmp_path, METHODS["truncatt"])
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


ATTN = "blocks.0.attn"
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a function as a module": (
        {"modules": {ATTN: {"kind": "os.system", "command": "touch /tmp/x"}}},
        "kind 'os.system'",
    ),
    "a class of torch as a module": (
        {"modules": {ATTN: {"kind": "torch.nn.Linear"}}},
        "kind 'torch.nn.Linear': expected",
    ),
    "a module without a kind": ({"modules": {ATTN: {}}}, "kind None"),
    "a kind that is no name": ({"modules": {ATTN: {"kind": ["os"]}}}, "do not make a model"),
    "a scale that is a text": (
        {"modules": {ATTN: {"kind": "factored", "scale": "x"}}},
        "scale='x': expected float",
    ),
    "a module that is a text": (
        {"modules": {ATTN: "os.system"}},
        "modules.blocks.0.attn: expected dict, got 'os.system'",
    ),
    "an argument that no module has": (
        {"modules": {ATTN: {"kind": "factored", "hook": "os.system"}}},
        "unexpected keyword argument",
    ),
    "an absolute path": ({"weights": "/etc/passwd"}, "weights: expected a file of this folder, got '/etc/passwd'"),
    "a path upwards": ({"weights": "../other/weights.safetensors"}, "weights: expected a file of this folder"),
    "the folder above": ({"weights": ".."}, "weights: expected a file of this folder"),
    "a link out": ({"weights": "link.safetensors"}, "weights: expected a file of this folder, got 'link.safetensors'"),
    "a dtype that is a function": ({"dtype": "load"}, "dtype: expected one of float64, float32, .*, got 'load'"),
    "a dtype that is a path": ({"dtype": "os.system"}, "dtype: expected one of float64, float32, .*, got 'os.system'"),
    "integers": ({"dtype": "int8"}, "dtype: expected one of"),
    "a model of the hub": ({"model": "hf-hub:somebody/model"}, "timm has no such model"),
    "a folder's model": ({"model": "local-dir:/tmp"}, "timm has no such model"),
    "another family": ({"family": "torch.hub"}, "family: expected one of"),
}


@pytest.fixture(scope="module")
def truncated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("truncated")
    saved(folder, METHODS["truncatt"])
    return folder


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_one_line(name: str, truncated: Path, tmp_path: Path) -> None:
    folder = tmp_path / "compressed"
    shutil.copytree(truncated, folder)
    (tmp_path / "outside.safetensors").write_bytes(next(folder.glob("weights-*")).read_bytes())
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    change, message = HOSTILE[name]
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


def test_damage_and_absence_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"manifest.json: cannot be read"):
        load(tmp_path)
    saved(tmp_path, METHODS["truncatt"])
    (weights,) = tmp_path.glob("weights-*")
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DataError, match="damaged: its content is not"):
        load(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="not a manifest"):
        load(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="lacks dtype"):
        load(tmp_path)


@pytest.mark.slow
def test_compression_imports_timm_first_or_not(tmp_path: Path) -> None:
    """In a process of its own, as the README has it: with a CPU build of torch, timm alone may not import."""
    code = "from attnlab.compression import densify, load\nimport timm\nassert timm.is_model('deit_small_patch16_224')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", ["truncatt", "identity"])
def test_a_dense_state_dict_computes_the_same(name: str) -> None:
    model = vit().double()
    compress(model, METHODS[name])
    dense = timm.create_model(NAMES[0], **OPTIONS).double().eval()
    assert densify(model, dense) is dense
    torch.testing.assert_close(dense(images().double()), model(images().double()), rtol=0, atol=1e-11)


def test_what_a_dense_head_cannot_hold_is_refused_or_said(caplog: pytest.LogCaptureFixture) -> None:
    model = vit()
    compress(model, CPSlimAtt(20, 8, sweeps=30))
    dense = timm.create_model(NAMES[0], **OPTIONS).eval()
    with pytest.raises(ConfigError, match="mix to a higher rank than a dense head"):
        densify(model, dense)
    densify(model, dense, exact=False)
    assert "not exact, relative error" in caplog.text
    slim = vit()
    compress(slim, CPSlimAtt(8, 4, sweeps=30))  # rank 8: every head's matrix fits
    densify(slim, dense)
    torch.testing.assert_close(dense(images()), slim(images()), rtol=0, atol=1e-3)
