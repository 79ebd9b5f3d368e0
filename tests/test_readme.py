"""README.md, docs/ and Makefile: commands are run or, if they need a corpus or a trained run, composed and checked."""

import importlib
import inspect
import math
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from huggingface_hub.cli.hf import app as hub
from omegaconf import OmegaConf

from attnlab.config.check import check, compose
from attnlab.config.schema import signature
from attnlab.errors import DataError
from attnlab.report import command as report
from attnlab.run.loading import load
from tests.command import ROOT, environment
from tests.pretrained.gguf_files import written

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
COMMANDS = [
    line.strip() for language, text in BLOCKS for line in text.replace("\\\n", " ").splitlines() if language == "bash"
]
INLINE = [line for line in re.findall(r"`(python -m src\.run [^`]+)`", TEXT) if "=sharp" not in line]
DEMO = re.findall(r"python -m src\.run .*", (ROOT / "Makefile").read_text(encoding="utf-8"))
OTHERS = ("vllm serve ", "curl ", "cp ", "python llama.cpp/")  # of other programs; tried by hand with the pinned engine
TINY = "task.model.d_model=16 task.attention_heads=2 task.train.max_steps=2 task.train.validate_every=2"


def python(part: str) -> str:
    """The only Python block of the pages that has this text."""
    (block,) = [text for language, text in BLOCKS if language == "python" and part in text]
    return block


def test_every_command_is_of_a_known_kind() -> None:
    assert len(COMMANDS) > 12 and {language for language, _ in BLOCKS} == {"bash", "text", "python", "yaml"}
    for command in COMMANDS:
        assert command.startswith(("make ", "python -m src.run ", "hf upload ", *OTHERS)), command
        if command.startswith("hf "):
            assert CliRunner().invoke(hub, [*shlex.split(command)[1:], "--help"]).exit_code == 0  # options are known
        if command.startswith("make "):
            target = re.sub(r"^(table|figure)-.*", r"\1-%", command.split()[1])
            assert f"\n{target}:" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "experiments/README.md"])
def test_commands_of_reports_are_right(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for people who add something: the arguments are accepted, and what they name in this checkout exists."""
    text = (ROOT / page).read_text(encoding="utf-8")
    commands = re.findall(r"^python -m attnlab report (.*)$", text, re.MULTILINE)
    assert len(commands) >= 3
    for name in ("_specified", "_of_records"):
        monkeypatch.setattr(report, name, lambda *options: [])
    monkeypatch.setattr(report.runs, "main", lambda words: 0)
    for command in commands:
        words = shlex.split(command.replace("PAPER", "t6").replace("TABLE", "variants"), comments=True)
        assert report.main(words) == 0
        for word in words:
            assert not word.startswith("experiments") or (ROOT / word).exists(), command


RUNS = [line for line in (*COMMANDS, *INLINE, *DEMO) if "src.run" in line]


@pytest.mark.parametrize("command", [line for line in RUNS if "hardware=slurm" not in line])  # see run/test_cluster.py
def test_commands_are_right(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compose and every key and value is accepted. Files and runs that they name stand where they say."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command, comments=True)[3:]
    for word in words:
        key, _, value = word.partition("=")
        if key in ("checkpoint", "resume", "baseline", "task.encoder_checkpoint"):
            (Path(value) / "checkpoints").mkdir(parents=True, exist_ok=True)
            (Path(value) / "checkpoints" / "last.ckpt").touch()
        if key in ("checkpoint", "resume"):
            _, task, mechanism, _ = value.split("/")
            group = "compress" if task in ("imagenet", "reasoning") else "attention"
            OmegaConf.save(compose(f"task={task}", f"{group}={mechanism}"), Path(value) / "config.yaml")
        if key == "model" and value.startswith("outputs/"):
            Path(value).mkdir(parents=True)
        elif key == "model" and value.startswith("experiments/"):
            Path("experiments").symlink_to(ROOT / "experiments")
        elif key == "model" and value == "FOLDER":
            Path(value).symlink_to(ROOT / "experiments" / "convert" / "llama_768")
        elif key == "model" and value.endswith((".pth", ".safetensors")):
            torch.save({}, value)
        elif key == "model" and value.endswith(".gguf"):
            pytest.importorskip("gguf")
            monkeypatch.setenv("ATTNLAB_CACHE", str(tmp_path / "cache"))
            written(tmp_path, "bos").rename(value)
    plan = check(words, load)
    values = [word.partition("=")[2].split(",") for word in words if "-m" in words and "[" not in word]
    assert len(plan.jobs) == math.prod(map(len, values))


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in COMMANDS if "mode=describe" in line])
def test_commands_without_data_run(command: str, tmp_path: Path) -> None:
    done = started(command, tmp_path)
    assert done.returncode == 0 and '"status": "finished"' in done.stdout, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "more"),
    [
        ("task=mustc attention=mtla stride=2", "task.train.max_epochs=1 task.decode.beam=2"),
        ("task=wikitext2 attention=tpa", TINY),
        ("task=imagenet compress=irratt rank=32", "task.pretrain.epochs=1 task.train.max_epochs=1"),
        ("bench_training", "bench.text=32 bench.rounds=1 bench.batch=1 bench.memory=false"),
    ],
)
def test_commands_on_sample_corpora_run(part: str, more: str, tmp_path: Path) -> None:
    """As the pages have them, but for fewer updates or smaller shapes."""
    (command,) = [line for line in COMMANDS if part in line and "data_root" not in line and "=outputs" not in line][:1]
    done = started(f"{command} {more} cache_dir={tmp_path}/cache hydra.run.dir={tmp_path}/run hardware=cpu", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert '"status": "finished"' in (tmp_path / "run" / "record.json").read_text()


def started(command: str, place: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of a checkout: `src` is found in the checkout, and outputs/ is written in `place`."""
    words = [sys.executable, *shlex.split(command)[1:]]
    return subprocess.run(words, cwd=place, env=environment(), capture_output=True, text=True, timeout=600)


def test_the_mechanism_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes its formula, in parallel, in steps and after a prefix, and its YAML file fits its signature."""
    package = shutil.copytree(ROOT / "src" / "attnlab" / "attention", tmp_path / "lifted")
    (package / "sharp.py").write_text(python("class SharpMHA"))
    naive = package / "ops" / "naive.py"
    naive.write_text(naive.read_text() + python("@formula(SharpMHA)"))
    monkeypatch.syspath_prepend(tmp_path)
    module: ModuleType = importlib.import_module("lifted.sharp")
    formulas: ModuleType = importlib.import_module("lifted.ops.naive")
    torch.manual_seed(0)
    attention: Any = module.SharpMHA(16, 2, sharpness=2.0).double()
    x, prefix = torch.randn(1, 5, 16).double(), torch.randn(1, 3, 16).double()
    for before in (None, prefix):
        want = formulas.attend(attention, x[0], None if before is None else before[0])
        cache = attention.new_cache(1, 5, 3)
        if before is not None:
            attention.read_prefix(before, None, cache)
        steps = torch.cat([attention.extend(part, cache) for part in x.split([2, 1, 2], 1)], 1)
        for got in (attention(x, before), steps):
            torch.testing.assert_close(got[0], want, rtol=1e-10, atol=1e-10)
    plain = importlib.import_module("lifted.mha").MHA(16, 2).double()
    plain.load_state_dict(attention.state_dict())
    assert (plain(x) - attention(x)).abs().max() > 1e-3  # the sharpness counts
    (text,) = [text for language, text in BLOCKS if language == "yaml" and "SharpMHA" in text]
    node = yaml.safe_load(text)
    assert node.pop("_target_") == "attnlab.attention.sharp.SharpMHA"
    assert set(node) == set(signature("lifted.sharp.SharpMHA").parameters)


def test_the_task_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its YAML file composes on another task, and its reader reads the layout that it names."""
    (text,) = [text for language, text in BLOCKS if language == "yaml" and "headlines" in text]
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "headlines.yaml").write_text(text)
    (tmp_path / "data.csv").write_text("article,headline\na b,a\n")
    cfg = check([f"--config-dir={tmp_path}", "task=headlines", f"data_root={tmp_path}"], load).jobs[0]
    assert (cfg.task.name, cfg.task.data.reader.target) == ("headlines", "headline")
    scope: dict[str, Any] = {}
    exec(python("class Lines"), scope)
    for side in ("src", "tgt"):
        (tmp_path / f"dev.{side}").write_text(f"first {side}\nsecond {side}\n")
    scope["Lines"]().check(tmp_path, ["dev"], "text")
    second = scope["Lines"]().read(tmp_path, "dev", "text", False)[1]
    assert (second.source, second.target) == ("second src", "second tgt")
    with pytest.raises(DataError, match=r"train\.src is missing"):
        scope["Lines"]().check(tmp_path, ["train"], "text")


def test_the_method_of_one_s_own() -> None:
    """Its YAML file fits its signature, and it compresses the last layer alone."""
    import timm

    from attnlab.compression import compress

    scope: dict[str, Any] = {"__name__": "last_mlp"}
    exec(python("class LastMLP"), scope)
    (text,) = [text for language, text in BLOCKS if language == "yaml" and "LastMLP" in text]
    assert set(yaml.safe_load(text)) == {"_target_", *inspect.signature(scope["LastMLP"]).parameters}
    model = timm.create_model("deit_small_patch16_224", depth=2, embed_dim=24, num_heads=3, num_classes=5)
    blocks: Any = model.blocks
    before = [sum(p.numel() for p in block.parameters()) for block in blocks]
    compress(model, scope["LastMLP"](4))
    after = [sum(p.numel() for p in block.parameters()) for block in blocks]
    assert after[0] == before[0] and after[1] < before[1]


def test_the_metric_of_one_s_own() -> None:
    scope: dict[str, Any] = {"__name__": "exact_match"}
    exec(python("class ExactMatch"), scope)
    metric = scope["ExactMatch"](3)
    metric.update([0, 1, 2], ["a", "b ", "c"], ["a", "b", "d"])
    assert metric.compute()["exact_match"] == 66.67


def test_loading_a_compressed_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    from attnlab.compression import compress, save
    from attnlab.compression.methods.truncatt import TruncAtt

    sizes: dict[str, Any] = {"depth": 1, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
    model = timm.create_model("deit_small_patch16_224", **sizes)
    compress(model, TruncAtt(4, 4))
    save(model, tmp_path / "outputs/imagenet/irratt/RUN/compressed", "deit_small_patch16_224", sizes)
    monkeypatch.chdir(tmp_path)
    code = python("densify").replace('"deit_small_patch16_224"', f'"deit_small_patch16_224", **{sizes}')
    scope: dict[str, Any] = {}
    exec(code, scope)
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(scope["dense"].eval()(x), scope["model"](x), rtol=1e-4, atol=1e-4)


def test_compressing_a_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlab.compression import load
    from attnlab.pretrained import huggingface
    from tests.pretrained.tiny import ids, logits, tiny

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface, "load", lambda source: tiny("llama"))
    scope: dict[str, Any] = {}
    exec(python("peft").replace("[1920, 60, 3]", "[12, 6]"), scope)  # grouped keys have no third rank
    torch.testing.assert_close(logits(scope["model"], ids()), logits(load("compressed"), ids()))
    trained = [name for name, value in scope["model"].named_parameters() if value.requires_grad]
    assert len(trained) == 8 and all("_proj.lora_" in name for name in trained)


def test_links_lead_somewhere() -> None:
    """Links and pictures of every page, each from its folder."""
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / "experiments").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)|<img src=\"([^\"]+)\"", page.read_text(encoding="utf-8")):
            assert (page.parent / "".join(target)).exists(), f"{page.relative_to(ROOT)}: {target}"
