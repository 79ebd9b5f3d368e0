"""Jobs on a cluster: the words that SLURM gives, and sweeps on a SLURM that is not one."""

import json
import re
import shlex
import signal
from pathlib import Path

import psutil
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment

from attnlab.config.check import check
from attnlab.errors import ConfigError
from attnlab.training.trainer import cluster_environment
from tests.golden.runs import corpus
from tests.run import fake_slurm
from tests.run.test_kill import Sweep
from tests.run.test_sweep import wait_for

LINES = ("task=wmt16", "attention=mha")


def test_nothing_but_submitit_queues_a_job_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SUBMITIT_EXECUTOR", "SLURM_NTASKS", "SLURM_JOB_NAME", "TORCHELASTIC_RUN_ID", "RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert cluster_environment() == []
    for name, value in {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "custom"}.items():
        monkeypatch.setenv(name, value)
    (environment,) = cluster_environment()
    assert isinstance(environment, SLURMEnvironment) and environment.auto_requeue is False
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    (environment,) = cluster_environment()
    assert isinstance(environment, LightningEnvironment) and not environment.creates_processes_externally


def test_slurm_is_refused_where_it_could_not_submit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SUBMITIT_EXECUTOR", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    jobs = ["-m", "hardware=slurm", *LINES]
    with pytest.raises(ConfigError, match="^hardware=slurm: jobs are submitted by -m, a single one too"):
        check(jobs[1:])
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra launch is not installed")
    with pytest.raises(ConfigError, match="^hardware=slurm: this machine has no sbatch; start the command on a"):
        check(jobs)
    (tmp_path / "sbatch").touch(mode=0o755)
    assert check(jobs).jobs
    with pytest.raises(ConfigError, match="^hardware.num_nodes=1 and 2: expected one value"):
        check([*jobs, "hardware.num_nodes=1,2"])


@pytest.mark.slow
@pytest.mark.parametrize(("page", "mark"), [("docs/how-to/sweep.md", ""), ("conf/hydra/launcher/slurm.yaml", "#")])
def test_the_examples_are_right(page: str, mark: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra launch is not installed")
    monkeypatch.setenv("PATH", fake_slurm.install(tmp_path / "slurm")["PATH"])
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8").replace(f"\\\n{mark}", " ")
    (line,) = re.findall(r"(?:attnlab|src\.run) (-m .* hardware=slurm .*)", text)
    jobs = check(shlex.split(line)).jobs
    assert len(jobs) == 3 and (jobs[0].hardware.num_nodes, jobs[0].hardware.devices) == (2, 4)


def training(folder: Path) -> Path | None:
    """A run that has saved a checkpoint."""
    return next((path.parents[1] for path in folder.glob("outputs/**/last.ckpt")), None)


CASES = {  # nodes, seeds, the strategy, and whether SLURM signals all processes of a job instead of its tasks
    "one process": (1, "1,2", "devices=1", True),
    "two processes on one node": (1, "1", "strategy=ddp hardware.devices=2", False),
    "two nodes": (2, "1,2", "strategy=ddp", False),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_job_at_its_time_limit_is_queued_again_and_continues(case: str, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra launch is not installed")
    nodes, seeds, strategy, everything = CASES[case]
    words = f"task.train.max_epochs=25 seed={seeds} hardware=slurm hardware.num_nodes={nodes} hardware.{strategy}"
    words += " hardware.accelerator=cpu hardware.precision=32-true"
    words += " hydra.launcher.gpus_per_node=null hydra.launcher.partition=tiny"
    sweep = Sweep(tmp_path / "sweep", corpus("wmt16", tmp_path / "corpus"), words)
    sweep.start(**fake_slurm.install(tmp_path / "slurm"))
    try:
        run = wait_for(lambda: training(sweep.folder), sweep.process, sweep.log.read_text)
        job = fake_slurm.JOB + json.loads((run / "record.json").read_text())["seed"] - 1
        for path in sorted((tmp_path / "slurm" / "pids").glob(f"{job}.*"), reverse=True):
            task = psutil.Process(int(path.read_text()))
            for member in [*task.children(recursive=True), task] if everything else [task]:
                member.send_signal(signal.SIGUSR2)
        assert sweep.process.wait(1200) == 0, sweep.log.read_text()[-3000:]
    finally:
        sweep.process.kill()
    script = (tmp_path / "slurm" / "script").read_text()
    number = len(seeds.split(","))
    assert number == 1 or f"--array=0-{number - 1}%{number}" in script  # submitit makes no array of one
    assert f"--nodes={nodes}" in script and "--signal=USR2@300" in script and "--partition=tiny" in script
    ended = [record for _, record in sweep.records()]
    assert [record["status"] for record in ended] == ["finished"] * number  # one directory each
    assert [record["training"]["resumed"] for record in ended].count(True) == 1
    assert (tmp_path / "slurm" / "requeued").read_text().split() == [
        f"{fake_slurm.JOB}_{job - fake_slurm.JOB}" if number > 1 else str(job)
    ]
    (line,) = [line for line in (run / "run.log").read_text().splitlines() if "interrupted by" in line]
    assert f"interrupted by SIGUSR2; resume={run}" in line
    assert f"{number} of {number} jobs finished" in sweep.log.read_text()
