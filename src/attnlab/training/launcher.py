"""Strategies of several processes whose processes end together, and say which of them ended first.

Lightning's own launcher looks every five seconds, and kills rank zero without a word when another rank has ended.
Lightning 2.6 has no public place for another one: a strategy makes its launcher in `_configure_launcher`, and a public
ClusterEnvironment could only start the processes itself, without what Lightning does for those of its launcher.
"""

import os
from collections.abc import Callable
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning.fabric.plugins.environments import (
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from attnlab.run import parents, ranks
from attnlab.run.cluster import inside
from attnlab.run.signals import starting


class Launcher(_SubprocessScriptLauncher):
    """Starts the other ranks of this node as processes that end with this one, and watches them."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[parents.PARENT] = str(os.getpid())
            try:
                with starting():
                    self._call_children_scripts()
            finally:
                del os.environ[parents.PARENT]
            first = self.cluster_environment.node_rank() * self.num_processes
            ranks.watch(dict(enumerate(self.procs, first + 1)))
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


def cluster_environment() -> list[Any]:
    """How the processes of a run on a cluster find each other, where Lightning's own choice is not what is meant.

    In a task of submitit this process starts the others of its node. Where SLURM itself started all processes, nothing
    queues the job again: Lightning's way of doing so would know neither the record nor the checkpoints of the run.

    Returns:
        A ClusterEnvironment, which is a plugin of Lightning's Trainer, or nothing.
    """
    if inside():
        return [LightningEnvironment()]
    if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
        return [SLURMEnvironment(auto_requeue=False)]
    return []


class Replicated(DDPStrategy):
    """DDPStrategy with :class:`Launcher`."""

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)


class Sharded(ModelParallelStrategy):
    """ModelParallelStrategy with :class:`Launcher`."""

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)
