"""`checkpoint=` and `resume=`: the configuration of a run, and the settings that a command may change."""

import json
from pathlib import Path

import hydra
import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from attnlab.attention import MTLA
from attnlab.config.check import Command, check, compose
from attnlab.errors import ConfigError
from attnlab.run.identity import recipe
from attnlab.run.loading import configuration, load
from attnlab.run.record import new

STARTED = ("task=wikitext2", "attention=mtla", "stride=3", "task.train.max_steps=20", "hardware=gpu", "seed=5")


@pytest.fixture(scope="module")
def started() -> DictConfig:
    return compose(*STARTED)


@pytest.fixture
def run(started: DictConfig, tmp_path: Path) -> Path:
    """An interrupted run with these settings."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "last.ckpt").touch()
    OmegaConf.save(started, tmp_path / "run" / "config.yaml")
    (tmp_path / "run" / "record.json").write_text(json.dumps({"status": "interrupted"}))
    return tmp_path / "run"


def plan(*overrides: str) -> Command:
    return check(overrides, load)


def use(run: Path, *overrides: str) -> DictConfig:
    return plan("mode=test", f"checkpoint='{run}'", *overrides).jobs[0]


def resume(run: Path, *overrides: str) -> Command:
    return plan(f"resume='{run}'", *overrides)


def test_nothing_but_the_run_is_named(run: Path, started: DictConfig) -> None:
    cfg = use(run)
    assert recipe(cfg) == recipe(started) and cfg.seed == 5 and cfg.choices.attention == "mtla"
    assert (cfg.attention.stride, cfg.attention._target_) == (3, "attnlab.attention.mtla.MTLA")
    assert (cfg.mode, cfg.checkpoint) == ("test", str(run))
    assert (cfg.hardware.accelerator, cfg.hardware.precision) == ("auto", "bf16-mixed")  # this machine's, the run's


def test_what_may_be_given(run: Path) -> None:
    expected = {
        "task.sampling.tokens=3": ("task.sampling.tokens", 3),
        "+task.evaluation.batch_size=4": ("task.evaluation.batch_size", 4),
        "hardware=cpu": ("hardware.precision", "32-true"),
        "hardware.devices=2": ("hardware.devices", 2),
        "bench.text=7": ("bench.text", 7),
        "seed=9": ("task.sampling.seed", 9),
        "data_root=/": ("task.data.root", "/"),
        "task=wikitext2": ("task.name", "wikitext2"),
        "stride=3": ("attention.stride", 3),
        "task.train.max_steps=20": ("task.train.max_steps", 20),
    }
    cfg = use(run, *expected)
    assert {key: OmegaConf.select(cfg, key) for key, _ in expected.values()} == dict(expected.values())


def test_an_experiment_that_says_how_a_run_is_scored(run: Path, tmp_path: Path) -> None:
    """It may name another task where it sets nothing that depends on the task."""
    file = tmp_path / "more" / "experiment" / "how.yaml"
    file.parent.mkdir(parents=True)
    words = (f"--config-dir={tmp_path / 'more'}", "experiment=how")
    other = "defaults:\n  - override /task: fineweb_edu\ntask:\n  evaluation:\n    tasks: [arc_easy, piqa]\n"
    file.write_text(other)
    assert use(run, *words, "mode=evaluate").task.evaluation.tasks == ["arc_easy", "piqa"]
    for content, key in {
        f"{other}  score:\n    nothing: 1\n": "task=fineweb_edu",
        "task:\n  optimizer:\n    lr: 3.0\n": "task.optimizer.lr=3.0",
    }.items():
        file.write_text(content)
        with pytest.raises(ConfigError, match=f"^{key}: checkpoint="):
            use(run, *words)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("attention=mha", "attention=mha: checkpoint= .* attention=mtla"),
        ("stride=4", "stride=4: .* stride=3"),
        ("task.optimizer.lr=0.5", "which has task.optimizer.lr=0"),
        ("task.train.max_steps=40", "which has task.train.max_steps=20"),
        ("task.sampling.tokns=3", "no such key; nearest: task.sampling.tokens"),
        ("task.sampling.tokens=x", "task.sampling.tokens=x: expected int"),
        ("attention=mtlla", "attention=mtlla: no such attention; nearest"),
        ("baseline=/nowhere", "baseline=/nowhere: no such file"),
        ("data_root='${seed}'", "give a value, not a reference"),
    ],
)
def test_anything_else_is_refused_by_its_key(run: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        use(run, override)


def test_an_unchanged_run_continues_where_it_is(run: Path) -> None:
    unchanged = resume(run, "hardware.devices=1")
    assert unchanged.jobs[0].mode == "train" and unchanged.jobs[0].hardware.accelerator == "gpu"
    assert unchanged.directory == run
    for words, message in {
        "hardware.precision=32-true": "hardware.precision=32-true: resume=",
        "-m": "leave -m out",
        "mode=predict input=x": "resume= is read by mode=train, not by mode=predict",
    }.items():
        with pytest.raises(ConfigError, match=message):
            resume(run, *words.split())
    (run / "checkpoints" / "last.ckpt").unlink()
    with pytest.raises(ConfigError, match="nothing to resume"):
        resume(run)


def test_a_higher_limit_is_a_new_run(run: Path) -> None:
    (run / "record.json").write_text(json.dumps({"status": "finished"}))
    with pytest.raises(ConfigError, match="the run is finished; raise task.train.max_steps"):
        resume(run)
    longer = resume(run, "task.train.max_steps=40")
    assert longer.jobs[0].task.train.max_steps == 40
    assert longer.directory == Path("outputs/wikitext2/mtla/test")


def test_a_multirun_over_runs_of_several_mechanisms(run: Path, started: DictConfig, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    with_another = OmegaConf.merge(started, {"choices": {"attention": "mha"}})
    OmegaConf.save(with_another, other / "config.yaml")
    several = plan("-m", "mode=test", f"checkpoint='{run}','{other}'")
    assert [job.choices.attention for job in several.jobs] == ["mtla", "mha"]
    assert [setting.key_or_group for setting in several.line.swept] == ["checkpoint"]
    assert "hydra.sweep.subdir='${hydra.job.num}'" in several.for_hydra


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["rank=16,32"], ["0_wikitext2_mla_rank=16", "1_wikitext2_mla_rank=32"]),
        (["attention=mha,mla", "seed=1,2"], ["0_wikitext2_mha_seed=1", "3_wikitext2_mla_seed=2"]),
        (["task.optimizer.lr=1e-3,0.01"], ["0_wikitext2_mla_lr=0.001", "1_wikitext2_mla_lr=0.01"]),
        (["scale=sample,comparison"], ["0_wikitext2_mla_scale=sample", "1_wikitext2_mla_scale=comparison"]),
        (["logger=csv,[tensorboard,csv]"], ["0_wikitext2_mla", "1_wikitext2_mla"]),
        (["data_root=/a/one,/a/two"], ["0_wikitext2_mla_data_root=one", "1_wikitext2_mla_data_root=two"]),
        (["task.data.corpus.name='a b','c/d'"], ["0_wikitext2_mla_name=a-b", "1_wikitext2_mla_name=d"]),
        (["tags=[a],[b]"], ["0_wikitext2_mla_tags=a", "1_wikitext2_mla_tags=b"]),
        (["hydra.sweep.subdir='x${seed}'", "seed=1,2"], ["x1", "x2"]),
    ],
)
def test_the_directory_of_a_job_names_what_is_swept(words: list[str], names: list[str]) -> None:
    attention = [] if any(word.startswith("attention") for word in words) else ["attention=mla"]
    checked = plan("-m", "task=wikitext2", *attention, *words)
    directories: list[str] = []
    for number, job in enumerate(checked.texts):
        settings = [text for text in checked.for_hydra if text.startswith("hydra.sweep.subdir=")]
        with checked.line.composer.hydra():
            keys = {setting.partition("=")[0] for setting in settings}
            forced = [text for text in job if text.partition("=")[0] not in keys]
            cfg = hydra.compose("config", [*forced, *settings, f"+hydra.job.num={number}"], return_hydra_config=True)
        directories.append(OmegaConf.select(cfg, "hydra.sweep.subdir"))
    assert [directories[0], directories[-1]] == names


def test_the_newest_run_of_a_folder(
    run: Path, started: DictConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, day, weights in (("a/1", 3, True), ("a/2", 4, True), ("b/3", 5, True), ("b/4", 6, False)):
        place = tmp_path / "outputs" / name
        (place / ("checkpoints" if weights else "curves")).mkdir(parents=True)
        OmegaConf.save(started, place / "config.yaml")
        record = new(started, "command") | {"status": "finished", "started": f"2026-01-0{day}T00:00:00+00:00"}
        (place / "record.json").write_text(json.dumps(record))
    for value, expected in {
        "latest": "b/3", "outputs": "b/3", "outputs/a": "a/2", "outputs/a/": "a/2", "outputs/a/1": "a/1",
    }.items():  # fmt: skip
        assert plan("mode=test", f"checkpoint={value}").jobs[0].checkpoint == str(tmp_path / "outputs" / expected)
        named = capsys.readouterr().err
        assert (f"outputs/{expected} (finished, the newest of" in named) == (value != "outputs/a/1")
    (tmp_path / "empty").mkdir()
    for value, message in {
        "empty": "checkpoint=empty: not the directory of a run, and no run with weights is in it",
        "nothing": "checkpoint=nothing: no such file",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            plan("mode=generate", f"checkpoint={value}")
    file = tmp_path / "other.safetensors"
    file.touch()
    with pytest.raises(ConfigError, match="task=mustc has no such mode; .*other.safetensors is no run"):
        plan("mode=generate", f"checkpoint={file}")


def test_what_uses_a_run_of_one_s_own_text_lies_beside_it(started: DictConfig, tmp_path: Path) -> None:
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "a.txt").write_text("text\n")
    place = tmp_path / "run"
    (place / "checkpoints").mkdir(parents=True)
    OmegaConf.save(compose("experiment=own/text", f"data_root={tmp_path / 'my'}"), place / "config.yaml")
    assert plan("mode=test", f"checkpoint={place}").directory.parent == Path("outputs/my/mtla")
    OmegaConf.save(started, place / "config.yaml")
    assert plan("mode=test", f"checkpoint={place}").directory.parent == Path("outputs/wikitext2/mtla")


def test_a_cache_of_another_machine(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNLAB_CACHE", str(tmp_path / "here"))
    change(run, "cache_dir", str(tmp_path))
    assert use(run).cache_dir == str(tmp_path)
    change(run, "cache_dir", "/nowhere/cache")
    assert use(run).cache_dir == use(run).task.data.cache_dir == str(tmp_path / "here")


def change(run: Path, key: str, value: object) -> None:
    plain = yaml.safe_load((run / "config.yaml").read_text())
    *path, last = key.split(".")
    node = plain
    for part in path:
        node = node[part]
    node[last] = value
    (run / "config.yaml").write_text(yaml.safe_dump(plain))


def test_a_key_that_was_added_since_has_its_default(run: Path) -> None:
    plain = yaml.safe_load((run / "config.yaml").read_text())
    del plain["prompt"], plain["baseline"]
    (run / "config.yaml").write_text(yaml.safe_dump(plain))
    assert use(run).prompt is use(run).baseline is None
    assert use(run).task.train.monitor is None  # of conf/task/base/sequence_to_text.yaml, later


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("task.optimizer._target_", "os.system", "os.system is no class of attnlab"),
        ("task.model._target_", "attnlab.run.record.subprocess.run", "expected a class derived from torch.nn.Module"),
        ("task.model.num_layers", 10**8, "config.yaml: task.model.num_layers=100000000: expected int >= 1 and <= 1024"),
        ("task.model.layers", [{"_target_": "subprocess.run"}], "task.model.layers.0._target_=subprocess.run"),
        ("task.name", "${oc.env:HOME}", "task.name is a reference"),
        ("task.model.d_modle", 4, "task.model.d_modle: attnlab.models.decoder.T6 has no parameter 'd_modle'"),
        ("task.model._target_", "attnlab.models.T7", "T7 is no class of attnlab"),
        ("choices", 3, "not the configuration of a run"),
        ("choices.task", "../../x", r"choices.task=../../x: expected the name of an option"),
        ("choices.logger", ["csv", "/x"], "choices.logger=.*: expected the name of an option"),
        ("attention", {}, "config.yaml: "),
        ("trainer", None, "config.yaml: "),
        ("task", [], "config.yaml: "),
    ],
)
def test_a_foreign_configuration_is_data(run: Path, key: str, value: object, message: str) -> None:
    change(run, key, value)
    with pytest.raises(ConfigError, match=message):
        use(run)


def test_a_configuration_that_is_no_plain_yaml(tmp_path: Path) -> None:
    for text in ("[1, 2", "z: &z [*z]", "[" * 400):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match="config.yaml: not the configuration of a run"):
            use(tmp_path)


def test_a_class_of_the_user(run: Path, tmp_path: Path) -> None:
    change(run, "attention._target_", "torch.nn.Identity")
    with pytest.raises(ConfigError, match="if it is yours, give --config-dir="):
        configuration(run)
    file = tmp_path / "more" / "attention" / "custom.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("_target_: torch.nn.Identity\n")
    with pytest.raises(ConfigError, match="expected a class derived from attnlab.attention.Attention"):
        configuration(run, config_dir=str(tmp_path / "more"))
    file.write_text(f"_target_: {__name__}.Custom\n")
    change(run, "attention._target_", f"{__name__}.Custom")
    cfg = configuration(run, "task.sampling.tokens=2", config_dir=str(tmp_path / "more"))
    assert cfg.attention._target_ == f"{__name__}.Custom" and cfg.task.sampling.tokens == 2


class Custom(MTLA): ...


def test_directories_that_are_no_run(tmp_path: Path) -> None:
    for key in ("checkpoint", "resume"):
        with pytest.raises(ConfigError, match=f"{key}= is empty"):
            plan("mode=test", f"{key}=")
    with pytest.raises(ConfigError, match="checkpoint=/nowhere: no such file or directory"):
        use(Path("/nowhere"))
    with pytest.raises(ConfigError, match="resume=.* no config.yaml"):
        resume(tmp_path)
    with pytest.raises(ConfigError, match="not the directory of a run"):
        configuration(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"config\.yaml: no such file"):
        use(tmp_path)
    with pytest.raises(ConfigError, match="give one of them"):
        plan(f"checkpoint='{tmp_path}'", f"resume='{tmp_path}'")


def test_only_the_command_line_names_a_folder_of_tasks(run: Path, tmp_path: Path) -> None:
    """Its files bring code: `!function`, and templates that reach all of Python."""
    change(run, "task.evaluation.folder", str(tmp_path))
    with pytest.raises(ConfigError, match=f"task.evaluation.folder={tmp_path}: .*, and tasks can bring code"):
        use(run, "mode=evaluate")
    assert use(run).mode == "test"  # which reads no tasks
    folder = f"task.evaluation.folder='{tmp_path}'"
    assert use(run, "mode=evaluate", folder).task.evaluation.folder == str(tmp_path)


@pytest.mark.slow
def test_no_file_of_one_s_own_names_a_folder_of_tasks(tmp_path: Path) -> None:
    (tmp_path / "more" / "experiment").mkdir(parents=True)
    file = tmp_path / "more" / "experiment" / "how.yaml"
    (tmp_path / "config.json").touch()
    composed = ("task=wikitext2", "attention=mha", "mode=evaluate", f"checkpoint='{tmp_path}'")
    for node in ("task: {evaluation: {folder: %s}}", "hydra: {sweeper: {params: {task.evaluation.folder: %s}}}"):
        file.write_text("# @package _global_\n" + node % tmp_path)
        with pytest.raises(ConfigError, match="tasks can bring code|a file of --config-dir cannot set it"):
            plan(f"--config-dir={tmp_path / 'more'}", "experiment=how", *composed)
