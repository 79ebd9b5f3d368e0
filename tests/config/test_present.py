"""What a refused command line costs: no library is loaded, and no directory is left."""

import subprocess
import sys
from pathlib import Path

import pytest
from timm.data.readers.img_extensions import get_img_extensions
from timm.optim import list_optimizers

from attnlab.config.build import CONF, has_driver
from attnlab.config.check import check, check_present
from attnlab.config.model import check_optimizer
from attnlab.config.schema import constant
from attnlab.data.images.layout import IMAGES
from attnlab.errors import ConfigError
from attnlab.run.loading import load

TASKS = [f"task={path.stem}" for path in sorted((CONF / "task").glob("*.yaml"))]
OWN = [f"experiment=own/{path.stem}" for path in sorted((CONF / "experiment" / "own").glob("*.yaml"))]
READS = [line for line in [*TASKS, *OWN] if line != "task=recall"]
SOME = [pytest.param(line, marks=[pytest.mark.slow] * bool(i % 3)) for i, line in enumerate(READS)]
SCRIPT = """
import sys
from attnlab.cli import main
code = main()
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
@pytest.mark.parametrize("word", ["hardware=gpu", "hardware.devices=[0]", "hardware.precision=16-mixed"])
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


@pytest.mark.parametrize(
    ("line", "folders", "named"),
    [
        ("task=wmt16", ["train.de"], "train.de: a directory; expected a file"),
        ("task=wikitext2", ["wiki.train.tokens"], "wiki.train.tokens: a directory; expected a file"),
        ("experiment=corpora/scitldr", ["train.jsonl"], "train.jsonl: a directory; expected a file"),
        ("experiment=own/summaries", ["train.jsonl"], "train.jsonl: a directory; expected a file"),
        ("experiment=corpora/an4", ["etc/an4_train.fileids"], "fileids: a directory; expected a file"),
    ],
)
def test_a_directory_where_a_file_belongs(line: str, folders: list[str], named: str, tmp_path: Path) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(ConfigError, match=named):
        present(line, f"data_root={tmp_path}")


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


def test_what_is_read_as_source_is_what_the_libraries_have() -> None:
    for name in [*map(str, list_optimizers()), "lookahead_adamw"]:
        check_optimizer(name)
    assert set(get_img_extensions()) == set(IMAGES)
    assert constant("attnlab.modes.train.READS_CORPUS") is True
