"""Which processes start which others on a cluster."""

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment

from attnlab.training.launcher import cluster_environment

NAMES = ("SUBMITIT_EXECUTOR", "SLURM_NTASKS", "SLURM_JOB_NAME", "TORCHELASTIC_RUN_ID", "RANK", "GROUP_RANK")


def test_nothing_but_submitit_queues_a_job_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert cluster_environment() == []
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    monkeypatch.setenv("SLURM_JOB_NAME", "mine")
    (found,) = cluster_environment()
    assert isinstance(found, SLURMEnvironment) and found.auto_requeue is False
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    (found,) = cluster_environment()
    assert isinstance(found, LightningEnvironment) and not found.creates_processes_externally
