"""A sweep that is killed at random moments and started again ends as one that was left alone, to the bit.

`make kill-test` runs it; KILLS=200 kills more often, KILL_SEED=7 at other moments, JOBS=4 has fewer jobs.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from attnlab.run.directory import holder_of
from tests.command import environment
from tests.golden.runs import TEXT, corpus

KILLS, SEED, JOBS = (
    int(os.environ.get(name, value)) for name, value in (("KILLS", 20), ("KILL_SEED", 1), ("JOBS", 12))
)
TINY = f"task=wmt16 attention=mha {TEXT} task.decode.beam=2 task.train.max_epochs=60 task.train.keep_best=2"
HARDWARE = {  # the words for it, and by how much the jobs and the kills are divided
    "one process": ("hardware=cpu", 1),
    "two ranks": ("hardware=ddp hardware.accelerator=cpu", 4),
}
PATIENCE = max(1800.0, 60.0 * JOBS)  # seconds for a sweep on a busy machine
GONE = 40.0  # seconds in which every process has ended after its parent was killed
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class Sweep:
    """One multirun, started as often as needed, in a new directory.

    Args:
        folder: where it is started.
        root: of the corpus.
        words: what is swept, and on which hardware.
    """

    def __init__(self, folder: Path, root: Path, words: str) -> None:
        folder.mkdir()
        where = [f"data_root='{root}'", f"cache_dir='{folder}/cache'"]
        self.command = [sys.executable, "-m", "attnlab", "-m", *TINY.split(), *words.split(), *where]
        self.folder, self.log = folder, folder / "log.txt"
        self.seen: dict[int, psutil.Process] = {}
        self.process: subprocess.Popen[bytes]

    def start(self, **variables: str) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, stdout=log, stderr=log, env=environment(**variables)
            )

    def running(self) -> bool:
        return self.process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """The sweep's process, its job and that job's ranks."""
        try:
            parent = psutil.Process(self.process.pid)
            children = [child for child in parent.children(recursive=True) if "attnlab" in " ".join(child.cmdline())]
        except psutil.NoSuchProcess:
            return []
        self.seen |= {child.pid: child for child in children}
        return [parent, *children]

    def wait_for_checkpoint(self, seconds: float) -> None:
        """Wait until a job in progress has a checkpoint, but not longer than this, nor than the sweep."""
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline:
            saved = self.folder.glob("outputs/**/last.ckpt")
            if any(holder_of(path.parents[1]) for path in saved):
                return
            time.sleep(0.05)

    def finish(self) -> int:
        self.start()
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()

    def records(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        for path in sorted(self.folder.glob("outputs/**/record.json")):
            yield path.parent, json.loads(path.read_text())

    def finished(self) -> dict[int, tuple[Path, dict[str, Any]]]:
        """The finished run of each seed. None is repeated."""
        runs = [(run, record) for run, record in self.records() if record["status"] == "finished"]
        seeds = [record["seed"] for _, record in runs]
        assert len(set(seeds)) == len(seeds), f"repeated: {seeds}"
        return dict(zip(seeds, runs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("hardware", HARDWARE)
def test_a_killed_sweep_ends_as_one_that_was_left_alone(hardware: str, tmp_path: Path) -> None:
    words, divisor = HARDWARE[hardware]
    jobs, kills = max(2, JOBS // divisor), max(1, KILLS // divisor)
    root = corpus("wmt16", tmp_path / "corpus")
    words = f"{words} seed={','.join(map(str, range(1, jobs + 1)))}"
    alone, killed = Sweep(tmp_path / "alone", root, words), Sweep(tmp_path / "killed", root, words)
    began = time.monotonic()
    assert alone.finish() == 0, alone.log.read_text()[-3000:]
    longest = 1.5 * (time.monotonic() - began) / jobs  # a start of the sweep, and a job

    rng, done, ended = random.Random(SEED), 0, time.monotonic()
    killed.start()
    while done < kills:
        if done % 2:
            time.sleep(rng.uniform(0, longest))
        else:  # in time for the job to continue there
            killed.wait_for_checkpoint(2 * longest)
            time.sleep(rng.uniform(0, 0.5))
        processes = killed.processes()
        if not killed.running():
            if len(killed.finished()) == jobs:  # the others would only look them up
                break
            killed.start()
            continue
        if not processes:  # one has ended while they were listed
            continue
        victim, number = rng.choice(processes), rng.choice(SIGNALS)
        try:
            victim.send_signal(number)
        except psutil.NoSuchProcess:  # it has ended in this moment
            continue
        done, ended = done + 1, time.monotonic()
        which = "parent" if victim is processes[0] else f"child {processes.index(victim)}"
        print(f"kill {done} of {kills}: {number.name} to {which} of {len(processes)}", flush=True)
        if victim is processes[0]:
            killed.process.wait(60)
            killed.start()
    assert done >= min(kills, jobs), f"{done} kills, before everything was finished"
    killed.processes()
    killed.process.kill()
    killed.process.wait()
    _, left = psutil.wait_procs(list(killed.seen.values()), timeout=GONE)
    assert not left, f"left behind {time.monotonic() - ended:.0f} s after the last signal: {left}"

    assert killed.finish() == 0, killed.log.read_text()[-3000:]
    expected, repeated = alone.finished(), killed.finished()
    assert sorted(repeated) == sorted(expected) == list(range(1, jobs + 1))
    for seed, (run, record) in expected.items():
        other, again = repeated[seed]
        assert record["quality"] == again["quality"] and record["training"]["steps"] == again["training"]["steps"]
        for name in ("predictions.tsv", "checkpoints/averaged.safetensors"):
            assert (other / name).read_bytes() == (run / name).read_bytes(), f"seed {seed}: {name}"
        assert not list(other.rglob(".*.partial"))
    assert all(holder_of(run) is None for run, _ in killed.records())
    resumed = sum(record["training"]["resumed"] for _, record in repeated.values())
    print(f"{done} kills; {jobs} jobs finished, {resumed} of them continued from a checkpoint")
    assert resumed or done < 4
    assert killed.finish() == 0  # and then there is nothing left to do
    assert {run for run, _ in killed.finished().values()} == {run for run, _ in repeated.values()}
