"""mode=export checkpoint=RUN: what a run was trained for, in the formats of other programs."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

from attnlab.compression import compress
from attnlab.compression import load as load_compressed
from attnlab.compression.methods.irratt import IrrAtt
from attnlab.compression.methods.truncatt import GlobalSVD
from attnlab.config.check import check, compose
from attnlab.errors import ConfigError, DataError, LockedError
from attnlab.export import images
from attnlab.modes import export, train
from attnlab.run.directory import foreign, locked
from attnlab.run.loading import load
from attnlab.run.record import new, write
from attnlab.tasks.image_classification.task import ImageClassificationTask
from tests.export.alone import run_card
from tests.export.trained import ids
from tests.golden.runs import TEXT
from tests.modes.conftest import TrainedRun
from tests.tasks.image_classification.test_task import TINY as IMAGES_TRAINED

LANGUAGE = (
    "task=wikitext2", "task.model.d_model=32", "task.model.num_layers=1", "task.model.max_length=24",
    "task.attention_heads=4", "task.data.window=16", "task.score.sliding_stride=null",
    "task.score.prompt_tokens=8", "task.sampling.tokens=8",
)  # fmt: skip
IMAGES = (
    "task=imagenet", "task.model.embed_dim=24", "task.model.depth=1", "task.model.num_heads=3",
    "task.model.patch_size=16", "task.data.image_size=32", "compress=none", "task.pretrain.epochs=1",
)  # fmt: skip
TRANSLATION = ("task=wmt16", *TEXT.split())


def configured(run: Path, *settings: str) -> DictConfig:
    return check(("mode=export", f"checkpoint='{run}'", "hardware=cpu", *settings), load).jobs[0]


def exported(run: Path, *settings: str) -> Path:
    """The folder that the mode writes."""
    record: dict[str, Any] = {}
    export.run(configured(run, *settings), record, None)
    return Path(record["exported"])


def front_matter(folder: Path) -> tuple[dict[str, Any], str]:
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


@torch.no_grad()
@pytest.mark.parametrize(("attention", "code"), [("gqa", False), ("mtla", True)])
def test_a_language_model_for_transformers(attention: str, code: bool, trained_run: TrainedRun) -> None:
    import transformers

    run, module = trained_run(*LANGUAGE, f"attention={attention}")
    folder = exported(run)
    assert (folder / "modeling_attnlab.py").exists() is code
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert tokenizer("w3 w4").input_ids == [27, 3, 4]
    front, text = front_matter(folder)
    assert front["license"] == "unknown" and front["library_name"] == "transformers"
    assert front["tags"] == ["attnlab", "wikitext2", attention]
    assert f"| parameters | {sum(p.numel() for p in module.model.parameters()):,} |" in text
    per_token = sum(a.cache_elements_per_token for a in module.model.attentions) * 4
    assert f"| cache, bytes per token | {per_token:,.0f} |" in text
    assert "## Quality\n\nnot run" in text and "| training steps | not run |" in text
    assert f"python -m attnlab task=wikitext2 {' '.join(LANGUAGE[1:])} attention={attention}" in text
    assert ("trust_remote_code=True" in text) is code and "embedded sample corpus" in text
    if not code:
        loaded = run_card(folder)["model"]
        torch.testing.assert_close(loaded(ids(1, 9)).logits, module.model(ids(1, 9)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "beside"), [(LANGUAGE, ["vocabulary.json"]), (TRANSLATION, ["tokenizer.model"])], ids=["text", "seq"]
)
def test_plain_weights(settings: tuple[str, ...], beside: list[str], trained_run: TrainedRun) -> None:
    run, module = trained_run(*settings)
    folder = exported(run, "format=safetensors")
    names = {"README.md", "config.json", "model.safetensors", *beside}
    assert {path.name for path in folder.iterdir()} == names
    weights = run_card(folder)["weights"]
    expected = module.model.state_dict()
    assert weights.keys() == expected.keys() and all(weights[name].equal(expected[name]) for name in weights)
    config = json.loads((folder / "config.json").read_text())
    assert config["attention"]["_target_"] == "attnlab.attention.mtla.MTLA" and config["files"] == beside
    assert config["parameters"]["total"] == sum(p.numel() for p in module.model.parameters())
    assert all((folder / name).read_bytes() == (run / name).read_bytes() for name in beside)
    assert f"`{beside[0]}`" in (folder / "README.md").read_text()


@torch.no_grad()
@pytest.mark.parametrize("format", ["format=hf", "format=safetensors"])
def test_images_for_timm(format: str, trained_run: TrainedRun) -> None:
    import timm

    run, module = trained_run(*IMAGES)
    folder = exported(run, format)
    pictures = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    loaded = run_card(folder)["model"].eval()
    assert not [name for name in (type(part).__module__ for part in loaded.modules()) if name.startswith("attnlab")]
    torch.testing.assert_close(loaded(pictures), module.model(pictures), rtol=0, atol=1e-6)
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 3}
    name = module.model.pretrained_cfg["architecture"]
    plain = timm.create_model(name, checkpoint_path=str(folder / "model.safetensors"), num_classes=3, **sizes)
    plain.eval()
    torch.testing.assert_close(plain(pictures), loaded(pictures), rtol=0, atol=0)
    config = json.loads((folder / "config.json").read_text())
    assert config["label_names"] == ["cat", "dog", "hen"]
    published = config["pretrained_cfg"]
    assert (published["interpolation"], published["input_size"]) == ("bicubic", [3, 32, 32])
    assert front_matter(folder)[0]["library_name"] == "timm"


def test_a_compressed_image_model_is_multiplied_out(trained_run: TrainedRun) -> None:
    import timm

    run, module = trained_run(*IMAGES)
    exact, mixed = deepcopy(module.model), deepcopy(module.model)
    cfg, place = configured(run), run.with_name("out")
    about = ImageClassificationTask(cfg).spec, ["a", "b", "c"], cfg, {"task": "imagenet"}
    compress(exact, GlobalSVD(rank=6))
    images.export(exact, *about, place)
    loaded = timm.create_model(f"local-dir:{place}", pretrained=True).eval()
    picture = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(picture), exact(picture), rtol=0, atol=1e-5)
    assert "factors are multiplied out" in (place / "README.md").read_text()

    compress(mixed, IrrAtt(rank=20, sweeps=1))
    with torch.no_grad():
        for name, parameter in mixed.named_parameters():
            if "fusion" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(ConfigError, match="cannot hold this compressed model exactly: blocks.0.attn: its heads mix"):
        images.export(mixed, *about, run.with_name("mixed"))
    assert not run.with_name("mixed").exists()


@pytest.mark.slow
def test_a_run_that_was_compressed_and_tuned(tmp_path: Path) -> None:
    import timm

    cfg = compose(*IMAGES_TRAINED, f"cache_dir='{tmp_path / 'cache'}'", "compress=global_svd", "rank=9")
    record = new(cfg, "test")
    run = tmp_path / "run"
    run.mkdir()
    train.run(cfg, record, run)
    OmegaConf.save(cfg, run / "config.yaml")
    write(record | {"status": "finished"}, run)
    for checkpoint in (run, run / "checkpoints" / "averaged.safetensors"):
        place = exported(checkpoint)
        loaded = timm.create_model(f"local-dir:{place}", pretrained=True).eval()
        size = cfg.task.data.image_size
        picture = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.testing.assert_close(loaded(picture), load_compressed(run / "compressed")(picture), rtol=0, atol=1e-5)
        labels = json.loads((place / "config.json").read_text())["label_names"]
        assert labels == json.loads((run / "classes.json").read_text())
        text = front_matter(place)[1]
        assert f"| top1 | {record['quality']['top1']:g}" in text and "factors are multiplied out" in text


def test_the_folder_is_a_part_of_the_run(trained_run: TrainedRun, tmp_path: Path) -> None:
    run, _ = trained_run(*LANGUAGE)
    for _ in range(2):
        folder = exported(run, "format=safetensors")
        assert folder == run / "exported" and foreign(run) == []
    (run / "record.json").write_text('{"status": "running"}')  # the end of any other is waited for
    with locked(run), pytest.raises(LockedError, match="mode=export: output="):
        exported(run)
    elsewhere = f"output={tmp_path / 'elsewhere'}"
    assert exported(run, "format=safetensors", elsewhere) == tmp_path / "elsewhere"
    with pytest.raises(ConfigError, match="elsewhere: expected a new or an empty folder"):
        exported(run, elsewhere)
    (folder / "notes.md").touch()
    with pytest.raises(ConfigError, match="exported/notes.md: no run has written it"):
        exported(run)


def test_a_sequence_to_text_model_has_no_form_of_transformers(trained_run: TrainedRun) -> None:
    run, _ = trained_run(*TRANSLATION)
    with pytest.raises(ConfigError, match="format=hf: transformers has no model for task=wmt16; format=safetensors"):
        exported(run)


def test_runs_without_weights_or_with_damaged_ones(trained_run: TrainedRun) -> None:
    run, _ = trained_run(*LANGUAGE)
    weights = run / "checkpoints" / "averaged.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="averaged.safetensors: damaged"):
        exported(run)
    weights.unlink()
    with pytest.raises(DataError, match="no checkpoints/averaged.safetensors here"):
        exported(run)
    weights.write_bytes(content)
    (run / "vocabulary.json").unlink()
    with pytest.raises(DataError, match="vocabulary.json: no such file"):
        exported(run)
    assert not (run / "exported").exists()


def test_a_run_without_a_record_has_no_numbers(trained_run: TrainedRun) -> None:
    run, _ = trained_run(*LANGUAGE)
    (run / "record.json").unlink()
    for content in (None, "{", "[" * 100_000, "{}"):
        if content:
            (run / "record.json").write_text(content)
        front, text = front_matter(exported(run, "format=safetensors"))
        assert front["tags"] == ["attnlab", "wikitext2", "mtla"]
        assert "| parameters | not run |" in text and "| corpus | not run |" in text
        assert "```bash\nnot run\n```" in text
