"""A refused command line loads no library and leaves no directory."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from timm.data.readers.img_extensions import get_img_extensions

from attnlab.config.build import CONF, has_driver
from attnlab.config.check import check, check_present
from attnlab.config.rules import TIMM, check_model
from attnlab.data.corpus import IMAGES
from attnlab.errors import ConfigError
from attnlab.run.loading import load

TASKS = [f"task={path.stem}" for path in sorted((CONF / "task").glob("*.yaml"))]
OWN = [f"experiment=own/{path.stem}" for path in sorted((CONF / "experiment" / "own").glob("*.yaml"))]
READS = [line for line in [*TASKS, *OWN] if line != "task=recall"]
SOME = [pytest.param(line, marks=[pytest.mark.slow] * bool(i % 3)) for i, line in enumerate(READS)]
SCRIPT = """
import sys
from attnlab.cli import command
code = command()
print(sorted({"torch", "lightning", "timm", "transformers"} & set(sys.modules)))
sys.exit(code)
"""


def refused(folder: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "[]\n", (done.stdout, done.stderr)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stderr


def present(*words: str) -> None:
    for cfg in check(words, load).jobs:
        check_present(cfg)


@pytest.mark.parametrize("line", [READS[0], *(pytest.param(line, marks=pytest.mark.slow) for line in READS[1:])])
def test_a_wrong_data_root_is_refused_before_libraries_are_loaded(line: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert str(missing) in refused(tmp_path, line, f"data_root={missing}")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_wrong_model_is_refused_before_libraries_are_loaded(tmp_path: Path) -> None:
    assert "model=/no/such.pth: no such file" in refused(tmp_path, "task=imagenet", "model=/no/such.pth")


@pytest.mark.skipif(has_driver(), reason="this machine may have such a device")
@pytest.mark.parametrize("word", ["hardware=gpu", "hardware.accelerator=cuda"])
def test_a_device_that_is_not_here_is_refused_before_a_run_is_changed(word: str) -> None:
    with pytest.raises(ConfigError, match=r"^hardware\."):
        present("task=recall", word)
    check(["task=recall", "mode=describe", word])


@pytest.mark.parametrize("line", SOME)
def test_a_corpus_is_a_directory_with_files(line: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path}/file:? .*a file"):
        present(line, f"data_root={tmp_path}/file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"{tmp_path}/empty"):
        present(line, f"data_root={tmp_path}/empty")
    present(line, f"data_root={tmp_path}/empty", "mode=describe")  # reads no corpus


@pytest.mark.parametrize("path", ["missing", "."])
@pytest.mark.parametrize(
    "line",
    [
        "task=wikitext2 task.data.vocabulary.file=",
        "task=fineweb_edu task.data.vocabulary.file=",
        "task=reasoning task.text.file=",
        "task=reasoning compress=tensorllm compress.calibration=",
        "task=wikitext2 convert=mla convert.calibration.file=",
        "task.encoder_checkpoint=missing_",
    ],
)
def test_a_file_that_is_not_there(line: str, path: str) -> None:
    key = line.split()[-1].partition("=")[0]
    with pytest.raises(ConfigError, match=f"{key}=.*(no such file|a directory)"):
        present(*f"{line}{path}".split())


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_a_command_that_is_refused_late_leaves_no_new_directory(there: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    if there:
        run.mkdir()
    line = f"task=wikitext2 task.train.batch.tokens=100000000 hardware=cpu hydra.run.dir={run}"
    done = subprocess.run([sys.executable, "-m", "attnlab", *line.split()], cwd=tmp_path, capture_output=True)
    assert done.returncode == 2 and run.exists() == there
    assert not there or (run / "record.json").is_file()


def test_image_endings_are_those_of_timm_and_others_of_pillow() -> None:
    assert set(get_img_extensions()) <= set(IMAGES) <= Image.registered_extensions().keys()


# --- pretrained models -------------------------------------------------------------------------------------------

ASKED = "attnlab.tasks.reasoning.model.AskedModel"


@pytest.mark.parametrize("source", ["/no/such/folder", "./there", "~/there", "a/b/c", "name/"])
def test_a_model_that_is_not_there(source: str) -> None:
    with pytest.raises(ConfigError, match="^model=.*: no such folder; give a Hugging Face model's"):
        check_model(source, ASKED)
    with pytest.raises(ConfigError, match="^model=.*: no such file or folder; give a .safetensors or .pth file"):
        check_model(f"{source.strip('/')}.pth", TIMM)


def test_a_language_model_is_a_folder_or_left_to_the_hub(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"a file; give its folder"):
        check_model(str(tmp_path / "model.safetensors"), ASKED)
    for source in (str(tmp_path), "gpt2", "EleutherAI/gpt-j-6b"):
        check_model(source, ASKED)


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("task.model.name=vit_smal_patch16_224", "vit_small_patch16_224"),
        ("model=deit_tiny_patch16_225", "deit_tiny_patch16_224"),
        ("task.optimizer.opt=adamww", "adamw"),
    ],
)
def test_names_of_timm(word: str, names: str) -> None:
    with pytest.raises(ConfigError, match=f"^{word}: timm has no such .*; nearest: .*{names}"):
        present("task=imagenet", word)
    for right in ("task.optimizer.opt=lookahead_adamw", "model=deit_small_patch16_224.fb_in1k", "model=hf-hub:a/deit"):
        present("task=imagenet", right)
