"""Weights of timm's hub: from the cache without a network, else refused within seconds."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import checkpoint_filter_fn

from attnlab.config.build import instantiate
from attnlab.config.check import check
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained.timm import Timm
from attnlab.run.loading import load
from tests.pretrained.tiny import fill

NAME = "deit_tiny_patch16_224.fb_in1k"


def test_the_cache_needs_no_network(cache: Path) -> None:
    place = cache / f"models--timm--{NAME}"
    (place / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    published, actual = (timm.create_model(NAME.partition(".")[0]) for _ in range(2))
    torch.nn.init.normal_(published.get_parameter("head.weight"))
    save_file(published.state_dict(), place / "snapshots" / ("0" * 40) / "model.safetensors")
    Timm().load(actual, NAME)
    assert all(torch.equal(value, published.state_dict()[name]) for name, value in actual.state_dict().items())
    (place / "snapshots" / ("0" * 40) / "model.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match=rf"model={NAME}: timm cannot load .*model.safetensors"):
        Timm().load(actual, NAME)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (NAME, r"the hub cannot be reached \(.*\); download it on a machine with a network, and give the file"),
        ("deit_tiny_patch16_224.fb_in2k", r"neither a local file nor weights that timm knows \(Invalid pretrained tag"),
        ("no_such_model", r"neither a local file nor weights that timm knows"),
    ],
)
def test_no_such_weights(source: str, message: str) -> None:
    model, began = timm.create_model(NAME.partition(".")[0], depth=1), time.perf_counter()
    with pytest.raises(DataError, match=f"model={source}: .*{message}"):
        Timm().load(model, source)
    assert time.perf_counter() - began < 5


# --- files and folders of timm -------------------------------------------------------------------------------------

TINY = {"embed_dim": 24, "depth": 1, "num_heads": 3}
WORDS = ["task=imagenet", "mode=compress", "compress=truncatt", "hardware=cpu"]
SIZES = [f"task.model.{key}={value}" for key, value in TINY.items()]


def made(name: str = "vit_tiny_patch16_224", **options: Any) -> Any:
    model = timm.create_model(name, **(TINY | {"img_size": 64, "num_classes": 0} | options))
    return fill(model, 0.05)


def test_a_file_whose_name_is_given(tmp_path: Path) -> None:
    """Neither the sample's sizes nor its images: those of the name, unless they are on the command line."""
    save_file(made().state_dict(), tmp_path / "x.safetensors")
    words = [*WORDS, f"model={tmp_path / 'x.safetensors'}", "task.model.name=vit_small_patch14_dinov2"]
    task = check(words, load).jobs[0].task
    assert task.model.name == "vit_small_patch14_dinov2" and task.data.image_size == task.model.img_size == 518
    assert {task.model[key] for key in ("embed_dim", "depth", "num_heads", "patch_size")} == {None}
    assert list(task.data.mean) == [0.485, 0.456, 0.406] and task.data.interpolation == "bicubic"
    task = check([*words, "task.data.image_size=28", "task.data.std=[1,1,1]", *SIZES], load).jobs[0].task
    assert task.data.image_size == task.model.img_size == 28 and list(task.data.std) == [1, 1, 1]
    assert {key: task.model[key] for key in TINY} == TINY
    plain = check([*WORDS, f"model={tmp_path / 'x.safetensors'}"], load).jobs[0].task
    assert plain.model.name == "vit_tiny_patch16_224" and plain.model.embed_dim == 64 and plain.data.image_size == 32


def test_a_name_of_timm_is_the_architecture() -> None:
    task = check([*WORDS, "model=vit_small_patch16_224.augreg_in1k"], load).jobs[0].task
    assert task.model.name == "vit_small_patch16_224" and task.model.weights == "vit_small_patch16_224.augreg_in1k"
    assert list(task.data.mean) == [0.5, 0.5, 0.5] and task.data.image_size == 224 and task.model.embed_dim is None


def folder_of_timm(place: Path, **about: Any) -> Any:
    model = made(num_classes=5)
    timm.models.save_for_hf(model, str(place), model_config=about, model_args=TINY | {"img_size": 64, "num_classes": 5})
    return model


def test_a_folder_of_timm(tmp_path: Path) -> None:
    known = {"input_size": [3, 64, 64], "mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7], "interpolation": "bilinear"}
    model = folder_of_timm(tmp_path, pretrained_cfg=known)
    task = check([*WORDS, f"model={tmp_path}"], load).jobs[0].task
    assert {key: task.model[key] for key in TINY} == TINY and task.data.image_size == 64
    assert list(task.data.mean) == known["mean"] and task.data.interpolation == "bilinear"
    again = instantiate(task.model, path="task.model").create(5)
    assert Timm().load(again, str(tmp_path)) == {}
    with pytest.raises(DataError, match="config.json has global_pool=token, and this model avg"):
        Timm().load(made(num_classes=5, global_pool="avg"), str(tmp_path))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("source", "side"), [(64, 64), (64, 96), (96, 32)])
def test_positions_of_another_image_size_are_resampled_as_timm_does(
    source: int, side: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(made(img_size=source, num_classes=3).state_dict(), tmp_path / "x.safetensors")
    actual, expected = (made(img_size=side, num_classes=3) for _ in range(2))
    timm.models.load_checkpoint(expected, str(tmp_path / "x.safetensors"), filter_fn=checkpoint_filter_fn)
    caplog.set_level("INFO")
    about = Timm().load(actual, str(tmp_path / "x.safetensors"))
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in actual.state_dict().items())
    grids = {"positions": [source // 16] * 2, "to": [side // 16] * 2}
    assert about == ({} if source == side else {"resampled": grids})
    assert ("is resampled to" in caplog.text) == (source != side)


def test_a_file_without_a_classifier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backbone, actual = made(), made(num_classes=7)
    head = actual.head.weight.clone()
    save_file(backbone.state_dict(), tmp_path / "x.safetensors")
    assert Timm().load(actual, str(tmp_path / "x.safetensors")) == {"head": "random"}
    assert "no classifier: a new one has random weights, for 7 classes" in caplog.text
    assert torch.equal(actual.head.weight, head) and torch.equal(actual.cls_token, backbone.cls_token)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("norm.weight"), r"lacks norm.weight"),
        (lambda x: x.update(extra=torch.ones(2)), r"has extra, which this"),
        (lambda x: x.update({"head.bias": torch.ones(7)}), r"lacks head.weight"),
        (lambda x: x.update({"head.weight": torch.ones(9, 24), "head.bias": torch.ones(9)}), r"head.weight has shape"),
        (lambda x: x.update(pos_embed=torch.ones(1, 16, 24)), r"pos_embed of 16 positions is no table of a square"),
        (lambda x: x.update(pos_embed=torch.ones(1, 17, 23)), r"pos_embed has shape"),
        (lambda x: x.update(pos_embed=torch.full((1, 10, 24), torch.nan)), r"pos_embed has values that are NaN"),
        (lambda x: x.update(pos_embed=torch.ones(1, 10, 24, dtype=torch.int32)), r"pos_embed .*table|dtype"),
        (lambda x: x.update(pos_embed=torch.ones(17, 24)), r"pos_embed has shape"),
        (lambda x: x.update(pos_embed=torch.ones(1, 0, 24)), r"pos_embed of 0 positions is no table"),
        (
            lambda x: x.update({"patch_embed.proj.weight": torch.ones(24, 3, 8, 8)}),
            r"patch_embed.proj.weight has shape",
        ),
    ],
)
def test_a_file_of_another_model(change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path) -> None:
    weights = dict(made().state_dict())
    change(weights)
    save_file(weights, tmp_path / "x.safetensors")
    with pytest.raises(DataError, match=message) as result:
        Timm().load(made(num_classes=7), str(tmp_path / "x.safetensors"))
    assert "\n" not in str(result.value) and "x.safetensors" in str(result.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "cannot be read as JSON"),
        ('{"architecture": "vit_tiny_patch17"}', "timm has no such model"),
        (
            '{"architecture": "vit_tiny_patch16_224", "model_args": {"class_token": false}}',
            "model_args have class_token",
        ),
        ('{"architecture": "vit_tiny_patch16_224", "model_args": {"in_chans": 1}}', "model_args have in_chans"),
        ('{"architecture": "vit_tiny_patch16_224", "model_args": [1]}', "model_args: expected an object"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": "x"}', "pretrained_cfg: expected an object"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"mean": "x"}}', "task.data.mean"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"std": [0, "a"]}}', "task.data.std"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"input_size": [3, -4, -4]}}', "image_size=-4"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"input_size": [3, 32, 64]}}', "the same width"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"input_size": 7}}', "input_size"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"interpolation": "best"}}', "interpolation"),
        ('{"architecture": "vit_tiny_patch16_224", "model_args": {"depth": "two"}}', "task.model.depth"),
    ],
)
def test_a_folder_of_timm_that_cannot_be_used(config: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises((ConfigError, DataError), match=message) as result:
        check([*WORDS, f"model={tmp_path}"], load)
    assert "\n" not in str(result.value)


def test_patches_that_do_not_divide_the_image() -> None:
    with pytest.raises(ConfigError, match="image_size=70: expected a multiple of vit_tiny_patch16_224's patches of 16"):
        Timm().create("vit_tiny_patch16_224", TINY | {"img_size": 70})
