"""Texts and paths are taken as they are typed, in every key that takes them, and a sweep has the same."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from attnlab.config.build import written
from attnlab.config.check import check
from attnlab.config.compose import Composer, quoted, takes_text
from attnlab.errors import ConfigError
from attnlab.run.loading import load
from tests.command import run_command
from tests.run.test_processes import write_texts
from tests.tasks.language_modelling.test_task import TINY

SLOW = pytest.mark.slow
FEW = ["/ümlaut, it's k=v [a {b: 1 C:\\new\\", '"Yes," she said. ']
MORE = [
    "/data/ümlaut", "/it's", "/k=v", "/a,b", "[a", "{a: 1}", " /lead and trail ", "/a[1]", "/a{b}", "/$x", "/100%",
    "/#1", "/😀", "-x", "/a'b\"c", "/a;b|c&d", "/a:b", "/(x)", "/a@b", "/a*?", "/!", "~", "/a\tb", "x\ny", "123",
    "1e5", "true", "None", "[a]", "a: b", "/\\", "/\\'", "=x", "/a\\,b", "\"'", "'", "''x", "}", "choice(a)",
    "range(1,3)", "~user", "!!python/x", "&a", "*a", "a,", ",", "'a' and 'b'", "\u202e", "/a  b", "a\\ b", "<x>",
    "C:\\new\\dir",
]  # fmt: skip
VALUES = [*FEW, *(pytest.param(value, marks=SLOW) for value in MORE)]
KEYS = (
    "model", "baseline", "hydra.run.dir", "task.evaluation.folder", "compress.calibration", "task.text.file",
    "+trainer.default_root_dir", "prove.python", "logger.wandb.name", "task.data.root",
)  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_a_text_reaches_the_configuration(value: str) -> None:
    composer = Composer()
    with composer.hydra():
        words = ["task=reasoning", "compress=tensorllm", "logger=wandb"]
        cfg = composer.job(composer.settings([*words, *(f"{key}={value}" for key in KEYS)]))
        assert [OmegaConf.select(cfg, key.lstrip("+")) for key in KEYS] == [value] * len(KEYS)


@pytest.mark.parametrize("value", VALUES)
def test_a_sweep_and_its_jobs_have_the_same(value: str) -> None:
    """In quotes, where the value has a comma."""
    path = f"/d{value}"
    command = check(["-m", "task=wikitext2", "seed=1,2", f"data_root={quoted(path) if ',' in path else path}"])
    assert [job.data_root for job in command.jobs] == [path] * 2
    (job,) = check(command.line.of_job(command.texts[1])).jobs  # its process
    assert job.data_root == job.task.data.root == path and job.seed == 2


def test_a_sweep_over_paths() -> None:
    words = ["-m", "task=wikitext2", "data_root=/a b, /it's,'/c,d'"]
    assert [job.data_root for job in check(words).jobs] == ["/a b", "/it's", "/c,d"]
    assert [job.data_root for job in check([*words[:2], "data_root=choice(/a,/b)"]).jobs] == ["/a", "/b"]


@pytest.mark.parametrize(("typed", "value"), [("'/a b'", "/a b"), ('"/it\'s"', "/it's"), ("'/it\\'s'", "/it's")])
def test_quotes_around_a_whole_value_are_left_out(typed: str, value: str) -> None:
    assert check(["task=wikitext2", f"data_root={typed}"]).jobs[0].data_root == value


def test_null_and_references() -> None:
    assert check(["task=wikitext2", "data_root=null"]).jobs[0].data_root is None
    assert check(["task=wikitext2", "seed=3", "data_root=/data/${seed}"]).jobs[0].data_root == "/data/3"
    command = check(["task=wikitext2", "seed=3", "hydra.run.dir=out/it's ${seed}"])
    assert str(command.directory) == "out/it's 3"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "it's, a=[run] {ü} $x #1"
    folder.mkdir()
    OmegaConf.save(check(["task=wikitext2", "hardware=cpu"]).jobs[0], folder / "config.yaml")
    return folder


@pytest.mark.parametrize(
    "value", [*VALUES, "${seed}", "a ${seed} \\${seed}", "${", "${oc.env:HOME}", "\\\\${x}", "$${x}"]
)
def test_a_run_that_is_used(value: str, run: Path) -> None:
    """A prompt has no references."""
    words = ["mode=generate", f"checkpoint={run}", f"prompt={value}"]
    (job,) = check(words, load).jobs
    assert job.checkpoint == str(run) and job.prompt == value
    assert OmegaConf.to_container(job, resolve=True)["prompt"] == value  # type: ignore[index,call-overload]
    if "${" not in value:
        words = ["mode=predict", words[1], "input=x", f"data_root=/d{value}", f"output={value}"]
        (job,) = check(words, load).jobs
        assert (job.data_root, job.task.data.root, job.output) == (f"/d{value}", f"/d{value}", value)


@pytest.mark.parametrize("key", ["prompt", "data_root", "output", "prove.python", "logger.wandb.name"])
@pytest.mark.parametrize("typed", ["???", "'???'", '"???"'])
def test_the_mark_of_a_missing_value_is_no_text(typed: str, key: str, run: Path) -> None:
    words = [f"{key}={typed}", *["logger=wandb"] * key.startswith("logger")]
    for command in (["mode=generate", f"checkpoint={run}"], ["task=wikitext2"]):
        with pytest.raises(ConfigError, match=rf"^{key}=\?\?\?: ") as error:
            check([*command, *words], load)
        assert "\n" not in str(error.value)


def test_which_keys_take_texts() -> None:
    with Composer().hydra():
        plain = written(Composer().compose(["task=lm1b"]))
    for key in ("data_root", "input", "prove.python", "task.data.vocabulary.file", "task.evaluation.folder"):
        assert takes_text(plain, key), key
    for key in ("seed", "tags", "task", "task.score", "hardware.devices", "task.evaluation.tasks", "hydra.verbose"):
        assert not takes_text(plain, key), key
    with pytest.raises(ConfigError, match=r'cannot read "tags=\[it.s\]"'):
        check(["tags=[it's]"])


@pytest.mark.slow
def test_a_run_and_its_configuration_have_what_was_typed(tmp_path: Path) -> None:
    """Trained, tested from its directory, and swept: the corpus and all directories have such names."""
    odd = "it's k=v, [ü] {x} $y #1 100% \\ ~ “q” 😀"
    root, runs = tmp_path / odd / "corpus", tmp_path / odd / "run"
    root.mkdir(parents=True)
    write_texts(root)
    words = ["task=wikitext2", *TINY, f"data_root={root}", f"cache_dir={tmp_path / odd / 'cache'}"]
    done = run_command(*words, f"hydra.run.dir={runs}")
    assert done.returncode == 0, done.stderr
    record, stored = json.loads((runs / "record.json").read_text()), OmegaConf.load(runs / "config.yaml")
    assert record["config"]["data_root"] == stored.data_root == str(root)
    used = run_command("mode=test", f"checkpoint={runs}", "hardware=cpu", f"hydra.run.dir={tmp_path / odd / 'test'}")
    assert used.returncode == 0, used.stderr
    again = json.loads((tmp_path / odd / "test" / "record.json").read_text())
    assert again["quality"] == record["quality"] and again["config"]["data_root"] == str(root)
    whole = [f'{word.partition("=")[0]}="{word.partition("=")[2]}"' if odd in word else word for word in words]
    swept = run_command("-m", *whole, "seed=1,2", f'hydra.sweep.dir="{tmp_path / odd / "sweep"}"', cwd=tmp_path)
    assert swept.returncode == 0 and "2 of 2 jobs finished" in swept.stderr, swept.stderr
