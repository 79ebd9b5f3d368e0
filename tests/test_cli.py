"""The command from outside, and the life of a run from inside."""

import logging
import pwd
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from attnlab import cli as entry
from attnlab.config.check import check
from attnlab.config.explain import explain
from attnlab.errors import ConfigError
from attnlab.run.loading import load
from tests.command import ROOT, environment, run_command


def test_a_typo_costs_seconds_and_leaves_nothing(tmp_path: Path) -> None:
    def seconds() -> float:  # of computing: a busy machine is no reason to fail
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    began = seconds()
    done = run_command("attention=mtlla", "stride=2", cwd=tmp_path)
    assert seconds() - began < 3
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: attention=mtlla: no such attention; nearest: mtla, mla, mlra\n"
    assert list(tmp_path.iterdir()) == []
    traced = run_command("attention=mtlla", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert "Traceback (most recent call last)" in traced.stderr and traced.stderr.endswith(done.stderr)


def test_a_checkout_runs_its_own_code(tmp_path: Path) -> None:
    """Another attnlab is on the path, as that of an editable install; processes that are started get the same."""
    (tmp_path / "attnlab").mkdir()
    (tmp_path / "attnlab" / "__init__.py").touch()
    script = "import src.run, attnlab, os; print(attnlab.__file__, os.environ['PYTHONPATH'].split(os.pathsep)[0])"
    started = [sys.executable, "-c", script]
    variables = environment(PYTHONPATH=str(tmp_path))
    done = subprocess.run(started, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.stdout.split() == [str(ROOT / "src" / "attnlab" / "__init__.py"), str(ROOT / "src")], done.stderr


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file in place of the folder")
    done = run_command("mode=bench", cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "outputs" in done.stderr


def test_processes_of_one_run_agree_on_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(entry.STAMP, "earlier")
    assert entry.stamp([]) != entry.stamp([]) != "earlier"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert entry.stamp([]) == "earlier"
    monkeypatch.delenv(entry.STAMP)
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir="):
        entry.stamp([])
    assert entry.stamp(["hydra.run.dir=outputs/x"])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun"):
        entry.stamp([])
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert entry.stamp([]) == "slurm-12-0"


def test_a_key_is_explained() -> None:
    text = explain(["attention.stride", "attention=mtla"])
    line = (ROOT / "src/attnlab/conf/attention/mtla.yaml").read_text().partition("\nstride:")[0].count("\n") + 2
    facts = ["int >= 1 and <= 1024", "2, from ${or:${stride},2}", f"conf/attention/mtla.yaml, line {line}"]
    assert all(fact in text for fact in [*facts, "merged into one slot", "attnlab.attention.MTLA"]), text
    assert "attnlab sets it" in explain(["trainer.max_steps"]) and "attnlab sets it" not in explain(["logger"])
    text = explain(["mode", "mode=describe"])
    assert "describe" in text and "the command line" in text
    with pytest.raises(ConfigError, match="no parameter 'max_epoch'; nearest: max_epochs"):
        explain(["trainer.max_epoch"])
    with pytest.raises(ConfigError, match="cannot read 'rusn'.*nearest command: runs"):
        entry.run(["rusn"])
    with pytest.raises(ConfigError, match="no such experiment; nearest: .*own/text"):
        explain(["seed", "experiment=own"])
    with pytest.raises(ConfigError, match=r"^task\.train\.max_stps: no such key; nearest: task\.train\.max_steps"):
        explain(["task.train.max_stps"])
    with pytest.raises(ConfigError, match="explain: give one key"):
        explain(["attention=mtla"])


@pytest.mark.slow
def test_completion_in_bash(tmp_path: Path) -> None:
    line = "attnlab attention=mt"
    done = run_command("-sc", "query=bash", cwd=tmp_path, COMP_LINE=line, COMP_POINT=str(len(line)))
    assert {"attention=mtla"} <= set(done.stdout.split())
    assert "complete" in run_command("-sc", "install=bash", cwd=tmp_path).stdout


def test_importing_the_package_is_light() -> None:
    """And so is the check of a command line."""
    script = """
import sys, attnlab
attnlab.load
print('torch' in sys.modules, 'hydra' in sys.modules)
from attnlab.config.check import check
check(["attention=mtla", "stride=2", "+task.optimizer.eps=1e-9"])
print(sorted({"torch", "lightning", "numpy", "torchvision", "timm", "rich", "matplotlib"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert done.stdout == "False False\n[]\n", done.stderr


@pytest.mark.parametrize("name", ["a${seed}b", "${nothing}", "\\${seed}", "${", "{seed}$"])
def test_the_name_of_a_run_directory_is_no_reference(name: str, tmp_path: Path) -> None:
    directory, before = tmp_path / name, logging.root.handlers[:]
    directory.mkdir()
    try:
        entry.set_up_logging(check(["mode=describe"], load).hydra, directory)
        logging.getLogger("attnlab").warning("written")
        (file,) = directory.glob("*.log")
        assert "written" in file.read_text()
    finally:
        for handler in {*logging.root.handlers} - {*before}:
            handler.close()
        logging.root.handlers[:] = before


def test_a_missing_home_directory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("ATTNLAB_CACHE", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(ConfigError, match=r"cache_dir=~/.cache/attnlab: HOME is not set, .* give cache_dir= a path"):
        check(["mode=describe"], load)
    assert check(["mode=describe", "cache_dir=/tmp/cache"], load).jobs
