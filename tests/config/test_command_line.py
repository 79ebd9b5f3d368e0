"""Right command lines, and configuration files; wrong command lines are in tests/golden/refusals.tsv."""

from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import ReadonlyConfigError

from attnlab.config import build as config
from attnlab.config.build import CONF, instantiate
from attnlab.config.check import check, compose
from attnlab.config.compose import Composer
from attnlab.config.explain import EXAMPLES, about
from attnlab.errors import ConfigError

SLOW = pytest.mark.slow


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def error(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(arguments)
    message = str(caught.value)
    assert "\n" not in message and message
    assert caught.value.exit_code == 2
    return message


RECIPES = [(task, scale) for task in options("task") for scale in Composer().scales(task)]


@pytest.mark.parametrize("hardware", options("hardware"))
def test_every_hardware_has_the_same_keys(hardware: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")  # hardware=slurm is refused where there is no cluster
    assert set(compose(f"hardware={hardware}").hardware) == set(compose().hardware)


def test_a_score_is_given_by_its_name(tmp_path: Path) -> None:
    """On the command line, in a file, and with its tokenizer."""
    expected = {"name": "bleu", "tokenize": "zh"}
    for settings in (["task.score=bleu"], ["task.score.name=bleu"], ["task.score={name: bleu}"]):
        assert compose("task=xsum", *settings, "task.score.tokenize=zh").task.score == expected
    file = tmp_path / "experiment" / "named.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\ndefaults:\n  - override /task: xsum\ntask:\n  score: bleu\n")
    words = [f"--config-dir={tmp_path}", "experiment=named", "task.score.tokenize=zh"]
    assert check(words).jobs[0].task.score == expected
    assert compose("task=mustc", "task.target=transcript").task.score == {"name": "wer", "tokenize": None}
    assert "task.score.tokenize=thai: expected 13a or zh" in error("task=wmt16", "task.score.tokenize=thai")
    assert "task.score.name" in error("task=wikitext2", "task.score=bleu")


@pytest.mark.parametrize("knob", config.KNOBS)
@pytest.mark.parametrize(
    "attention",
    [
        name if name in ("mha", "mtla", "tpa") else pytest.param(name, marks=SLOW)
        for name in options("attention")
        if name != "hybrid"
    ],
)
def test_a_knob_feeds_one_place_or_is_refused(attention: str, knob: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        reads = config.knob_paths(Composer().compose([f"attention={attention}"]), knob)
    if not reads:
        assert f"attention={attention} has no {knob}" in error(f"attention={attention}", f"{knob}=12")
        return
    (path,) = reads
    with_knob = compose(f"attention={attention}", f"{knob}=12")
    assert OmegaConf.select(with_knob, path) == with_knob[knob] == 12
    assert OmegaConf.select(compose(f"attention={attention}"), path) != 12


def test_settings_of_an_option_that_is_swept() -> None:
    """Hydra composes a multirun first with the default option, which has no such key."""
    words = ["task=reasoning", "seed=1", "compress=laser,tensorllm", "compress.layers=[0]"]
    with pytest.raises(ConfigError, match="compress.matrices=.*expected a list, each q or k or v or o"):
        check(["-m", *words, "compress.matrices=[attn]"])  # laser's alone
    checked = check(["-m", *words, "compress.keep=0.5"])
    assert [(job.compress.keep, list(job.compress.layers)) for job in checked.jobs] == [(0.5, [0])] * 2
    assert checked.for_hydra == [*words[:3], "++compress.layers=[0]", "++compress.keep=0.5"]
    assert checked.line.of_job(checked.texts[1]) == [
        *words[:2], "compress=tensorllm", "compress.layers=[0]", "compress.keep=0.5"
    ]  # fmt: skip


def test_keys_with_a_second_spelling() -> None:
    search = "compress.search=[{layers: [0]},{layers: [1]}]"
    cfg = compose("task=reasoning", "compress=tensorllm", search)
    assert cfg.task.search == [{"layers": [0]}, {"layers": [1]}]
    assert "task.search" in error("task=imagenet", "compress=irratt", search)
    assert compose("trainer.limit_train_batches=3").trainer == {"limit_train_batches": 3}


# --- help and lists; what they print is in tests/golden/outputs.txt -------------------------------------------


@pytest.mark.parametrize("group", config.GROUPS)
def test_every_option_says_what_it_is(group: str) -> None:
    for name in Composer().options(group):
        assert about(CONF / group / f"{name}.yaml"), f"conf/{group}/{name}.yaml begins with no comment"


@pytest.mark.slow
def test_the_examples_of_the_help_are_right() -> None:
    for _, command in EXAMPLES:
        if "checkpoint=" not in command:
            assert check(command.split()).jobs


# --- attention.pattern=[...]: the files that a hybrid stack is made of ----------------------------------------


def test_a_multirun_takes_a_stack_with_values_of_its_own() -> None:
    words = ["attention.pattern=[sliding_window,mla]", "attention.mechanisms.sliding_window.window=4"]
    checked = check(["-m", "task=recall", *words, "+attention.mechanisms.sliding_window.qk_norm=true", "rank=16,8"])
    jobs = [job.attention.mechanisms for job in checked.jobs]
    assert {(job.sliding_window.window, job.sliding_window.qk_norm) for job in jobs} == {(4, True)}
    assert [job.rank for job in checked.jobs] == [job.mla.latent_dim for job in jobs] == [16, 8]


def test_jobs_of_a_multirun_write_no_common_output() -> None:
    words = ["-m", "task=recall", "attention=mha,mla", "mode=describe"]
    with pytest.raises(ConfigError, match=r"output=a.json: 2 jobs would write this file; leave output= out"):
        check([*words, "output=a.json"])
    assert len(check(words).jobs) == 2


def test_an_overlay_may_choose_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /attention: hybrid\nattention:\n  pattern: [mha, gqa]\n"
    (tmp_path / "experiment" / "mixed.yaml").write_text(text)
    cfg = check([f"--config-dir={tmp_path}", "task=wikitext2", "experiment=mixed"]).jobs[0]
    assert list(cfg.attention.mechanisms) == ["mha", "gqa"] and cfg.choices.attention == "hybrid"


# --- YAML files of a user ---------------------------------------------------------------------------------------------


def write_option(directory: Path, name: str, text: str) -> str:
    path = directory / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return f"--config-dir={directory}"


def test_a_knob_may_come_from_the_file_that_a_file_builds_on(tmp_path: Path) -> None:
    flag = write_option(tmp_path, "attention/mine", "defaults: [mtla]\ndropout: 0.5\n")
    cfg = check([flag, "attention=mine", "stride=3"]).jobs[0]
    assert (cfg.choices.attention, cfg.attention.stride, cfg.attention.dropout) == ("mine", 3, 0.5)
    assert "nearest: mine" in error(flag, "attention=mne")
    assert "with one: attention=mine, attention=mtla" in error(flag, "attention=mha", "stride=3")


def test_a_task_is_one_file(tmp_path: Path) -> None:
    """Without a recipe of its own a task takes the sample scale of the file that it builds on."""
    text = (CONF / "task" / "wikitext2.yaml").read_text().replace("name: wikitext2", "name: mine")
    flag = write_option(tmp_path, "task/mine", text)
    cfg = check([flag, "task=mine"]).jobs[0]
    assert (cfg.choices.task, cfg.task.name, cfg.task.model.d_model) == ("mine", "mine", 128)
    assert "task=mine has no scale=paper; there are: pretrained, sample" in error(flag, "task=mine", "scale=paper")


# --- the fixed configuration ------------------------------------------------------------------------------------


def test_the_configuration_is_resolved_and_read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATA_ROOT", "some/where")
    monkeypatch.setenv("ATTNLAB_CACHE", "~/cache")
    monkeypatch.chdir(tmp_path)
    cfg = compose()
    assert "${" not in OmegaConf.to_yaml(cfg)
    assert cfg.data_root == cfg.task.data.root == str(tmp_path / "some/where")
    assert cfg.cache_dir == str(Path.home() / "cache")
    with pytest.raises(ReadonlyConfigError):
        cfg.seed = 2
    with pytest.raises(ReadonlyConfigError):
        cfg.task.train.clip = 2


def test_resolvers() -> None:
    cfg = OmegaConf.create({"n": None, "a": 6, "or": "${or:${n},${a}}", "mul": "${mul:2,${a}}", "div": "${div:${a},3}"})
    config.resolve(cfg)
    assert (cfg["or"], cfg.mul, cfg.div) == (6, 12, 2)
    with pytest.raises(ConfigError, match=r"x\.y = \$\{div:7,2\}: 7 is not a multiple of 2"):
        config.resolve(OmegaConf.create({"x": {"y": "${div:7,2}"}}))


# --- from a node to an object -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_head": 2}, "attention: .*unexpected keyword argument 'num_head'"),
        ({"num_heads": 2, "num_kv_heads": 3}, "attention: num_kv_heads must divide num_heads"),
        ({"num_heads": 2, "num_kv_heads": 3, "_partial_": True}, "attention: num_kv_heads must divide num_heads"),
    ],
)
def test_instantiate_names_the_place_of_an_error(keys: dict[str, Any], message: str) -> None:
    node = OmegaConf.create({"_target_": "attnlab.attention.MHA", "d_model": 16} | keys)
    with pytest.raises(ConfigError, match=message) as caught:
        instantiate(node, "attention")()
    assert caught.value.__cause__ is not None
    with pytest.raises(ConfigError, match="^attention: expected a _target_"):
        instantiate(OmegaConf.create({"num_heads": 4}), "attention")
