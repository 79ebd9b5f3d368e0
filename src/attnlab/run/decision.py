"""What a job of a multirun does: skip what is finished, continue what was interrupted, try again what failed.

The job is looked up by its configuration, before data is read: runs below outputs/ and in the multirun's own directory
that have its recipe, seed and mode, and read what it would read. A corpus counts by its content: where a record has
the fingerprint of one, the corpus that the job would read is digested too (texts that have not changed are not read
again), so that one that changed at its place is another. The embedded sample corpora follow from the configuration.
"""

import contextlib
import functools
import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnlab.errors import AttnlabError, LockedError, WriteError
from attnlab.run import fingerprint, identity
from attnlab.run import record as records
from attnlab.run.directory import RECORD
from attnlab.run.ledger import OUTPUTS, Ledger, LedgerEntry, key_of
from attnlab.run.loading import ELSEWHERE, FREE
from attnlab.run.lock import held, locked

SAMPLE = "sample"  # the name that a record gives to an embedded corpus
GIVING = ("predict", "generate", "export")  # modes whose result is not their record: they are always done
LAST = Path("checkpoints") / "last.ckpt"
NOT_RESUMED = ("mode", "resume", "retry", "rerun")  # settings of a job that `resume=` gives by itself
SHORT = 10  # characters of a commit
CLAIMS = ".jobs"  # the folder in outputs/ with a lock for each job that a multirun has taken

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """What a job does.

    Args:
        what: "start", "skip" (finished, or left failed), "leave" (in progress elsewhere) or "continue".
        directory: the run's.
        said: the same for people, in one line.
        left: of a job that another multirun has taken, by which :func:`left_to` finds its run; empty: any other job.
    """

    what: str
    directory: Path
    said: str
    left: Mapping[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def claimed(cfg: DictConfig, sweep: Path) -> Iterator[str | None]:
    """Take a job inside the block: a run needs seconds before it has a record by which other multiruns can see it.

    Args:
        cfg: the job's fixed configuration.
        sweep: the multirun's directory.

    Yields:
        Who else has taken the job; None: this process has it.
    """
    if cfg.mode in GIVING or cfg.get("rerun"):
        yield None
        return
    outside = len(places(sweep)) > 1 and not OUTPUTS.is_dir()
    base = (sweep if outside else OUTPUTS) / CLAIMS
    about = json.dumps([_key(cfg), cfg.mode, cfg.seed, cfg.task.name])
    name = hashlib.sha256(about.encode()).hexdigest()[:32]
    other = None
    with contextlib.ExitStack() as stack:
        try:
            base.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(base, name=name))
        except LockedError:
            other = held(base, name)
        except (OSError, WriteError) as error:
            log.warning("%s: no job can be taken there (%s); another multirun may start the same one", base, error)
        yield other


def decide(cfg: DictConfig, own: Path, sweep: Path, other: str | None = None) -> Decision:
    """Decide what a job of a multirun does.

    Args:
        cfg: the job's fixed configuration; `retry` and `rerun` count.
        own: the directory that the job would have, which may hold an earlier run.
        sweep: the multirun's directory.
        other: who else has taken the job, see :func:`claimed`; None: nobody.

    Raises:
        ConfigError, DataError: the job has no identity (see :mod:`attnlab.run.identity`).
    """
    fresh = free(own)
    if cfg.mode in GIVING:
        return Decision("start", fresh, f"starts: {_near(fresh)}")
    if cfg.get("rerun"):  # a user's own root file may lack it
        return Decision("start", fresh, f"starts, whatever is finished (rerun=true): {_near(fresh)}")
    found = earlier(cfg, places(sweep))
    if done := [run for run in found if run.status == "finished"]:
        return Decision(
            "skip", done[-1].directory, f"finished before, skipped: {_near(done[-1].directory)}{_commit(done[-1])}"
        )
    for run in found:
        if run.status == "running" and (holder := held(run.directory)):
            return Decision(
                "leave", run.directory, f"in progress elsewhere ({holder}), left to it: {_near(run.directory)}"
            )
    if other:
        said = f"taken by another multirun ({other}), left to it"
        return Decision("leave", fresh, said, _left(cfg, places(sweep), found))
    failed = [run for run in found if run.status == "failed"]
    if failed and not cfg.get("retry", True):
        why = f"failed before ({_short(failed[-1].error)}), left (retry=false)"
        return Decision("skip", failed[-1].directory, f"{why}: {_near(failed[-1].directory)}{_commit(failed[-1])}")
    before = [run for run in found if run.status in ("interrupted", "running")]
    if cfg.mode == "train" and (begun := _begun([*failed, *before])):
        ended = f"failed before ({_short(begun.error)})" if begun in failed else "interrupted before"
        said = f"{ended}, continues from its checkpoint: {_near(begun.directory)}{_commit(begun)}"
        return Decision("continue", begun.directory, said)
    if before:
        return Decision("start", fresh, f"interrupted before it saved a checkpoint, starts again: {_near(fresh)}")
    if failed:
        return Decision("start", fresh, f"failed before ({_short(failed[-1].error)}), starts again: {_near(fresh)}")
    return Decision("start", fresh, f"starts: {_near(fresh)}")


def _left(cfg: DictConfig, folders: Sequence[Path], found: Sequence[LedgerEntry]) -> dict[str, Any]:
    """What finds the run of a taken job later: what it is, and the runs of other corpora that are there already."""
    about = {"key": _key(cfg), "mode": cfg.mode, "seed": cfg.seed, "task": cfg.task.name}
    alike = [run.directory for folder in folders for run in Ledger(folder).alike(**about)]
    mine = {run.directory for run in found}
    return about | {"others": [str(path.absolute()) for path in alike if path not in mine]}


def left_to(left: Mapping[str, Any], sweep: Path) -> Path | None:
    """The run of a job that was left to another multirun: finished, or in progress; None: there is none yet.

    Args:
        left: of the decision.
        sweep: the directory of the multirun that has left it.
    """
    about = {name: left[name] for name in ("key", "mode", "seed", "task")}
    runs = [run for folder in places(sweep) for run in Ledger(folder).alike(**about)]
    runs = [run for run in runs if str(run.directory.absolute()) not in left["others"]]
    for status in ("finished", "running"):
        if having := [run for run in runs if run.status == status]:
            return max(having, key=lambda run: run.started).directory
    return None


def places(sweep: Path) -> list[Path]:
    """The folders in which runs are looked for: outputs/, and a multirun's directory that lies elsewhere.

    Args:
        sweep: the multirun's directory.
    """
    inside = sweep.resolve().is_relative_to(OUTPUTS.resolve())
    return [OUTPUTS] if inside else [OUTPUTS, sweep]


def earlier(cfg: DictConfig, folders: Sequence[Path]) -> list[LedgerEntry]:
    """The recorded runs that are this job, the oldest first.

    Args:
        cfg: the job's fixed configuration.
        folders: where to look.
    """
    key = _key(cfg)
    found = [run for folder in folders for run in Ledger(folder).alike(key, cfg.mode, cfg.seed, cfg.task.name)]
    return sorted((run for run in found if _same_corpus(cfg, run)), key=lambda run: run.started)


def _key(cfg: DictConfig) -> str:
    device, threads = _machine(cfg.hardware.accelerator) if cfg.mode == "bench" else (None, None)
    return key_of(cfg, None, device, threads)


def free(own: Path) -> Path:
    """A directory without a run: `own`, or the same name with the first number that is free.

    Args:
        own: the directory that Hydra gives to a job.
    """
    tries = (own if n == 1 else own.with_name(f"{own.name}_{n}") for n in range(1, sys.maxsize))
    return next(path for path in tries if not any((path / name).exists() for name in (RECORD, "config.yaml", LAST)))


def settings(cfg: DictConfig, given: Sequence[str]) -> list[str]:
    """The settings of a job that say where and how it runs, for `resume=`, which takes all others from its run.

    Args:
        cfg: the job's fixed configuration.
        given: the job's settings and flags.
    """
    kept = []
    for text in given:
        key, equals, value = text.partition("=")
        bare = key.lstrip("+")
        if text.startswith("-") or key.startswith("hydra"):
            kept.append(text)
        elif not equals or bare in NOT_RESUMED or not any(f"{bare}.".startswith(f"{one}.") for one in FREE):
            continue
        elif "${" not in value:
            kept.append(text)
        elif bare not in ELSEWHERE and isinstance(now := OmegaConf.select(cfg, bare), str | int | float):
            kept.append(f"{key}={json.dumps(now, ensure_ascii=False)}")  # resume= takes values, no references
    return kept


def _begun(runs: Sequence[LedgerEntry]) -> LedgerEntry | None:
    """The run whose last checkpoint is the newest; None: none has one."""
    having = [run for run in runs if (run.directory / LAST).is_file() and (run.directory / "config.yaml").is_file()]
    return max(having, key=lambda run: (run.directory / LAST).stat().st_mtime, default=None)


def _same_corpus(cfg: DictConfig, run: LedgerEntry) -> bool:
    """Whether a run read what the job would read."""
    if run.content in (identity.NOTHING_READ, records.NOT_RUN):  # the run read nothing, or ended before it did
        return True
    root = OmegaConf.select(cfg, "task.data.root") or cfg.data_root
    if root is None or run.corpus == SAMPLE:
        return root is None and run.corpus == SAMPLE
    try:
        return _content(Path(str(root)).expanduser(), Path(cfg.cache_dir)) == run.content
    except AttnlabError:  # the job will say what is wrong with its corpus
        return False


@functools.cache
def _content(root: Path, cache_dir: Path) -> str:
    """Once in a process: the jobs of a multirun mostly read the same corpus."""
    return fingerprint.corpus(root, cache_dir)


@functools.cache
def _commit_now() -> str:
    return records.commit()


def _commit(run: LedgerEntry) -> str:
    """What to say where the code that made a record was another."""
    now = _commit_now()
    if run.commit == now:
        return ""
    return f" (made by commit {_name(run.commit)}, this is {_name(now)}; rerun=true repeats it)"


def _name(commit: str) -> str:
    digits, dash, dirty = commit.partition("-")
    return digits[:SHORT] + dash + dirty if digits.isalnum() else commit


def _near(path: Path) -> Path:
    """A path as people read it: from the working directory, if it lies below that."""
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _short(error: str) -> str:
    text = " ".join(error.split())
    return text if len(text) <= 80 else f"{text[:79]}…"


@functools.cache
def _machine(accelerator: str) -> tuple[str, int]:
    """The device and the threads of this machine, as a record of mode=bench has them: asked in another process."""
    code = "import json, sys; from attnlab.run.record import environment; print(json.dumps(environment(sys.argv[1])))"
    command = [sys.executable, "-c", code, accelerator]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found["device"], found["threads"]
