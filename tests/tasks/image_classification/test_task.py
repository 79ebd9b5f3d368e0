"""The whole flow on a few tiny images: train, resume, test, describe, and what is refused."""

from pathlib import Path
from shutil import copytree
from typing import Any

import attnlab.torchvision_schemas

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

import attnlab
from attnlab.compression import load
from attnlab.compression.modules.attention import SlimAttention
from attnlab.errors import ConfigError, DataError
from attnlab.modes import compress as compress_mode
from attnlab.modes import describe, test, train
from attnlab.pretrained.timm import VisionTransformer
from attnlab.run.identity import architecture
from attnlab.run.record import problems
from attnlab.tasks.base import Trains, task_of
from attnlab.tasks.image_classification.pretraining import pretrain
from tests.tasks.conftest import Start, predictions, recorded, starter

TINY = [
    "task=imagenet",
    "hardware=cpu",
    "task.model.embed_dim=24",
    "task.model.depth=2",
    "task.model.num_heads=3",
    "task.model.patch_size=16",
    "task.pretrain.epochs=1",
    "task.data.sample_train=2",
    "task.data.sample_val=1",
    "task.train.batch.images=12",
    "task.train.max_epochs=2",
]


@pytest.fixture
def start(cache: Path) -> Start:
    return starter(*TINY, f"cache_dir='{cache}'")


@pytest.mark.parametrize("compress", [pytest.param("irratt", marks=pytest.mark.slow), "cp_slimatt"])
def test_load_score_compress_score_tune_score(compress: str, start: Start, cache: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    record = recorded(train, start(f"compress={compress}", "rank=9"), directory)
    assert problems(record | {"status": "finished"}) == []
    assert record["corpus"] == "embedded sample of ImageNet's layout" and record["attention"] == "none"
    about = record["compression"]
    points = about["quality"]
    assert points["finetuned"] == record["quality"] and record["quality"]["images"] == 12
    assert 0 <= points["dense"]["top1"] <= points["dense"]["top5"] <= 100
    assert record["training"]["steps"] == 4
    assert record["training"]["images_per_second"] > 0 and record["training"]["tokens_per_second"] == "not run"
    assert record["rank"] == 9
    assert [layer["path"] for layer in about["layers"]] == ["blocks.0.attn", "blocks.1.attn"]
    assert 0 < about["remaining"]["attention_percent"] < 100
    model = load(directory / "compressed")
    weights = load_file(directory / "checkpoints" / "averaged.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert_tested(start, tmp_path, directory, points["finetuned"], f"compress={compress}", "rank=9")
    if compress == "irratt":
        assert_used_elsewhere(directory, tmp_path, cache / "samples")


def assert_tested(start: Start, tmp_path: Path, run: Path, quality: dict[str, Any], *settings: str) -> None:
    """mode=test gives the quality of a run, which its predictions have as well."""
    record = recorded(test, start(*settings, "mode=test", f"checkpoint='{run}'"), tmp_path / "test")
    assert record["quality"] == quality
    rows = predictions(run)
    assert len(rows) == 12
    right = sum(row["reference"] == row["hypothesis"] for row in rows)
    assert quality["top1"] == pytest.approx(100 * right / 12, abs=1e-3)


def assert_used_elsewhere(directory: Path, tmp_path: Path, images: Path) -> None:
    """A copy of the run, without the training images and without a cache, names the classes that the run named."""
    (tmp_path / "elsewhere").mkdir()
    model: Any = attnlab.load(copytree(directory, tmp_path / "elsewhere" / "run"), f"cache_dir='{tmp_path / 'empty'}'")
    rows = {row["source"]: row["hypothesis"] for row in predictions(directory)}
    (places,) = images.rglob("val")
    results = model.predict(places)
    assert [result["prediction"] for result in results] == [rows[name] for name in sorted(rows)]
    alone = model.predict(next(places.rglob("*.png")), top=3)
    probabilities = [choice["probability"] for choice in alone["classes"]]
    assert len(probabilities) == 3 and probabilities == sorted(probabilities, reverse=True) and sum(probabilities) < 1
    assert len(results[0]["classes"]) == 5 and alone["classes"][0]["class"] == alone["prediction"]
    labelled = ImageFolder(places)  # a Dataset of (image, label)
    assert [result["prediction"] for result in model.predict(labelled)] == [rows[name] for name in sorted(rows)]
    picture, expected = labelled[0][0], model.predict(labelled.imgs[0][0])
    row = {"image": picture, "label": 1}
    assert model.predict(picture) == model.predict(pil_to_tensor(picture)) == expected
    assert model.predict(row) == row | expected
    with pytest.raises(DataError, match="^not an image: "):
        model.predict(torch.zeros(7))
    (tmp_path / "broken.png").write_text("no image")
    with pytest.raises(DataError, match=r"broken\.png: cannot be decoded as an image"):
        model.predict(tmp_path / "broken.png")
    (tmp_path / "elsewhere" / "run" / "classes.json").write_text("[1]")
    with pytest.raises(DataError, match=r"classes\.json: expected a list of the names of the classes"):
        attnlab.load(tmp_path / "elsewhere" / "run")


@pytest.mark.parametrize("settings", [["compress=none"], ["compress=truncatt", "rank=3"]])
def test_a_head_is_trained_alone(settings: list[str], start: Start, tmp_path: Path) -> None:
    """All other weights stay as they are, those of the modules of a compression too."""
    runs = [tmp_path / "slow", tmp_path / "fast"]
    for run, rate in zip(runs, (1e-3, 1e-2), strict=True):
        record = recorded(train, start("task.trained=head", f"task.optimizer.lr={rate}", *settings), run)
        assert record["parameters"]["trainable"] == 24 * 12 + 12 < record["parameters"]["total"]
    one, two = (load_file(run / "checkpoints" / "averaged.safetensors") for run in runs)
    assert {name for name, value in one.items() if not torch.equal(value, two[name])} == {"head.weight", "head.bias"}
    if settings != ["compress=none"]:
        untuned = [predictions(run, "compressed.predictions.tsv") for run in runs]
        assert untuned[0] == untuned[1] and len(untuned[0]) == 12


def test_mode_compress(start: Start, tmp_path: Path) -> None:
    """Load, score, compress, score, save: the weights of mode=train before it trains, and no training."""
    settings, directory = ["compress=truncatt", "rank=3", "compress.mlp_rank=9"], tmp_path / "run"
    settings += ["task.data.sample_val=3"]
    record = recorded(compress_mode, start("mode=compress", *settings), directory)
    assert problems(record | {"status": "finished"}) == []
    points = record["compression"]["quality"]
    assert points["finetuned"] == "not run" and record["training"]["steps"] == "not run"
    assert points["compressed"] == record["quality"] and points["dense"]["images"] == 36
    assert record["compression"]["change"].startswith("top-1 ")
    assert record["parameters"]["total"] == record["compression"]["remaining"]["parameters"]
    assert [layer["path"] for layer in record["compression"]["layers"]] == [
        "blocks.0.attn", "blocks.1.attn", "blocks.0.mlp", "blocks.1.mlp",
    ]  # fmt: skip
    assert sorted(path.name for path in directory.iterdir() if path.name != "pretraining") == [
        "classes.json", "compressed", "config.yaml", "dense.predictions.tsv", "predictions.tsv",
    ]  # fmt: skip
    model = load(directory / "compressed")
    assert sum(p.numel() for p in model.parameters()) == record["parameters"]["total"]
    settings += ["mode=test", f"checkpoint='{directory}'"]
    assert recorded(test, start(*settings), tmp_path / "test")["quality"] == points["compressed"]
    with pytest.raises(DataError, match="compressed: the checkpoint is of another compression"):
        test.run(*start(*settings, "rank=4"), tmp_path / "other")


@pytest.mark.slow
def test_mode_compress_with_calibration_images_and_a_budget(start: Start, tmp_path: Path) -> None:
    settings = ["mode=compress", "compress=tensorllm", "compress.keep=0.6", "compress.weighted=true"]
    record = recorded(compress_mode, start(*settings), tmp_path / "run")
    assert problems(record | {"status": "finished"}) == []
    layers = record["compression"]["layers"]
    assert all(0 < layer["output_error"] < 1 and len(layer["output_errors"]) == 4 for layer in layers)
    assert sum(layer["parameters"] for layer in layers) <= 0.6 * 2 * 4 * 24 * 24 and record["rank"] is None
    with pytest.raises(ConfigError, match=r"compress.calibration=a.txt: task=imagenet takes validation"):
        describe.run(*start(*settings, "compress.calibration=a.txt"), tmp_path / "other")


@pytest.mark.slow
def test_a_resumed_run_ends_where_an_unbroken_one_does(start: Start, tmp_path: Path) -> None:
    """With averaged weights and Mixup; stopped in the middle of an epoch."""
    settings = ["compress=irratt", "rank=9", "task.ema_decay=0.5", "task.mixup.mixup_alpha=0.8"]
    settings += ["task.train.keep_best=1"]
    recorded(train, start(*settings), tmp_path / "whole")
    broken = tmp_path / "broken"
    recorded(train, start(*settings, "task.train.max_epochs=1", "task.schedule.num_epochs=2"), broken)
    recorded(train, start(*settings, f"resume='{broken}'"), broken)
    ends = [
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True) for name in ("whole", "broken")
    ]
    for kind in ("state_dict", "trained"):
        for name, value in ends[0][kind].items():
            torch.testing.assert_close(ends[1][kind][name], value, rtol=1e-5, atol=1e-6, msg=f"{kind} {name}")
    assert not all(torch.equal(ends[0]["state_dict"][name], value) for name, value in ends[0]["trained"].items())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fusion_penalty=0.5", "fusion=constrained"])
def test_from_a_constrained_cp_run_to_irratt(way: str, start: Start, tmp_path: Path) -> None:
    cfg, record = start("compress=cp_slimatt", "rank=9", f"compress.{way}", "task.train.max_epochs=1")
    first = tmp_path / "cp"
    recorded(train, (cfg, record), first)
    assert any(isinstance(module, SlimAttention) for module in load(first / "compressed").modules())
    irregular = start("compress=irratt", f"model='{first}'", "task.train.max_epochs=1")
    record = recorded(train, irregular, tmp_path / "irratt")
    assert record["compression"]["start"] == architecture(cfg)["compression"]
    assert sum(record["compression"]["layers"][0]["ranks"]) == 9
    dropped = record["compression"]["layers"][0]["fusion_dropped"]
    assert dropped < 1e-6 if way == "fusion=constrained" else 0 < dropped < 1


def test_a_pretrained_model_is_scored_as_it_is(start: Start, tmp_path: Path) -> None:
    """mode=test without a run: as good as the dense point of a compression of the same weights."""
    model = VisionTransformer("vit_tiny_patch16_224", None, 32, 16, 24, 2, 3).create(12)
    weights = tmp_path / "weights.safetensors"
    save_file({name: value.clone() for name, value in model.state_dict().items()}, weights)
    record = recorded(test, start("mode=test", f"model='{weights}'"), tmp_path / "run")
    assert problems(record | {"status": "finished"}) == [] and "compression" not in record
    settings = ["mode=compress", "compress=truncatt", "rank=8", f"model='{weights}'"]
    other = recorded(compress_mode, start(*settings), tmp_path / "compressed")
    assert record["quality"] == other["compression"]["quality"]["dense"]
    assert other["compression"]["start"] is None


def refused(start: Start, tmp_path: Path, *overrides: str, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        train.run(*start(*overrides), tmp_path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_trial_pretrains_little_and_leaves_nothing_to_others(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """debug=fast: the whole run is short, and no other run begins with its weights."""
    caplog.set_level("INFO")
    for settings, epochs in ((["debug=fast"], 1), ([], 2)):
        cfg, record = start("mode=compress", "compress=truncatt", "rank=4", "task.pretrain.epochs=2", *settings)
        task = task_of(cfg, Trains)
        pretrain(cfg, record, tmp_path, *task.prepare(record, None))
        assert record["pretraining"]["epochs"] == epochs
    assert "task.pretrain.epochs" in caplog.text


def test_what_is_refused_before_data_is_read(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnlab.data.images.folder.ImageData.setup", lambda *_: pytest.fail("data was read"))
    for line, message in {
        "compress=truncatt rank=9": "rank=9: blocks.0.attn takes 1 to 8",
        "compress=irratt compress.mlp_rank=25": "compress.mlp_rank=25",
        "compress=mlp_svd rank=9 compress.keep=0.5": "compress.keep chooses the ranks; give it, or compress.mlp_rank",
        "compress=cp_slimatt compress.fusion=constrained compress.fusion_penalty=1": "give one of them",
        "task.pretrain.epochs=0": "there are no pretrained weights to compress",
        "compress=irratt task.model.name=swin_tiny_patch4_window7_224": "swin",
        "task.model.num_heads=7": "refuses its sizes",
        "mode=compress": "mode=compress needs compress=<method>, one of cp_slimatt, ",
        "mode=test": "mode=test needs checkpoint=",
    }.items():
        assert message in refused(start, tmp_path, *line.split(), kind=ConfigError)


@pytest.mark.slow
def test_checkpoints_that_do_not_fit(start: Start, tmp_path: Path) -> None:
    model = VisionTransformer("vit_tiny_patch16_224", None, 32, 16, 24, 2, 3).create(12)
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    def error(name: str, changed: dict[str, Any] | bytes) -> str:
        path = tmp_path / name
        if isinstance(changed, bytes):
            path.write_bytes(changed)
        elif name.endswith("pth"):
            torch.save(changed, path)
        else:
            save_file(changed, path)
        return refused(start, tmp_path, f"model='{path}'", kind=DataError)

    bad = {"blocks.0.attn.qkv.weight": torch.full_like(weights["blocks.0.attn.qkv.weight"], torch.nan)}
    cases: list[tuple[str, dict[str, Any] | bytes, str]] = [
        ("a.safetensors", {k: v for k, v in weights.items() if k != "cls_token"}, "lacks cls_token"),
        ("b.pth", {"model": weights | {"extra": torch.ones(1)}}, "has extra"),
        ("c.safetensors", weights | {"head.bias": torch.ones(5)}, "head.bias has shape (5,)"),
        ("d.pth", b"PK\x03\x04nothing", "not a readable checkpoint"),
        ("e.pth", {"model": Path()}, "more than tensors"),
        ("f.pth", b"\x80\x02abc", "not a readable checkpoint"),
        ("g.pth", weights | bad, "blocks.0.attn.qkv.weight has values that are NaN or infinite"),
    ]
    for name, changed, message in cases:
        assert message in error(name, changed)
    torch.save({"state_dict": weights}, tmp_path / "good.pth")
    good = start(f"model='{tmp_path / 'good.pth'}'", "task.train.max_epochs=1")
    assert "pretraining" not in recorded(train, good, tmp_path / "good")
