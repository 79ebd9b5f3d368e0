"""Ctrl-C, once, ends every phase of a run within seconds: exit code 130, one line, nothing left behind."""

import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

LONGEST = 12.0  # seconds, on a machine that is busy; four on a free one

SPEECH = ("task=mustc", "hardware=cpu")
PAIRS = ("experiment=own/translation", "data_root={pairs}", "task.data.vocab_size=8000", "hardware=cpu")
SHORT = ("task=wmt16", "hardware=cpu", "task.train.max_steps=2", "task.train.validate_every=2")
PHASES = {  # a phase: the command, the line after which the signal is sent, and how many seconds later
    "sample speech": (SPEECH, "NO data_root", 2.0),
    "features": (SPEECH, "computing features", 1.0),
    "pieces of a vocabulary": (PAIRS, "corpus:", 2.0),
    "pretraining of images": (("task=imagenet", "compress=irratt", "rank=32"), "from scratch", 3.0),
    "pretraining of text": (("task=reasoning", "compress=tensorllm"), "training a small", 3.0),
    "fit": (("task=wikitext2", "hardware=cpu"), "each update", 3.0),
    "decoding of the test set": (SHORT, "kept the best checkpoint", 2.0),
    "bench": (("task=wikitext2", "mode=bench", "bench.what=[training]"), "", 20.0),
    "multirun": (("-m", "task=wikitext2", "hardware=cpu", "seed=1,2"), "each update", 3.0),
}


def write_pairs(folder: Path) -> None:
    """Sentence pairs from which SentencePiece learns for half a minute."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(60000)]
    folder.mkdir()
    with (folder / "data.jsonl").open("w") as file:
        for _ in range(60000):
            file.write(json.dumps({side: " ".join(rng.choices(words, k=12)) for side in ("source", "target")}) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_one_interrupt_ends_a_phase(phase: str, tmp_path: Path) -> None:
    arguments, pattern, seconds = PHASES[phase]
    if "{pairs}" in " ".join(arguments):
        write_pairs(tmp_path / "pairs")
    given = [text.format(pairs=tmp_path / "pairs") for text in arguments]
    where = f"hydra.{'sweep' if '-m' in given else 'run'}.dir={tmp_path / 'run'}"
    process = subprocess.Popen(
        [sys.executable, "-m", "attnlab", *given, where, f"cache_dir={tmp_path / 'cache'}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    lines: queue.Queue[str] = queue.Queue()
    assert process.stderr is not None
    errors = process.stderr

    def read() -> None:
        for line in errors:
            lines.put(line)

    reader = threading.Thread(target=read)
    reader.start()
    seen = ""
    while pattern and not re.search(pattern, seen):
        assert process.poll() is None or not lines.empty(), seen
        try:
            seen += lines.get(timeout=1)
        except queue.Empty:
            continue
    time.sleep(seconds)
    assert process.poll() is None, seen
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    began = time.monotonic()
    code = process.wait(timeout=120)
    took = time.monotonic() - began
    reader.join(5)
    while not lines.empty():
        seen += lines.get()
    assert code == 130, seen
    assert took < LONGEST, f"{took:.1f} s\n{seen}"
    assert seen.count("error: interrupted by SIGINT") == 1 and "Traceback" not in seen, seen
    assert not psutil.wait_procs(children, timeout=5)[1], "processes were left behind"
    records = [json.loads(path.read_text()) for path in (tmp_path / "run").rglob("record.json")]
    assert [record["status"] for record in records] == ["interrupted"]


IMPORTS = {  # imported module, after which the signal is sent: how often, and what is printed besides the imports
    "signal": (1, ""),
    "attnlab.errors": (1, ""),
    "omegaconf": (1, ""),
    "hydra.main": (1, ""),
    "attnlab.cli": (1, ""),
    "torch": (1, "error: interrupted by SIGINT"),
    "lightning": (1, "error: interrupted by SIGINT"),
    "attnlab.report.curves": (1, "error: interrupted by SIGINT"),
}
CHILD = {"signal": (2, ""), "omegaconf": (2, ""), "torch": (1, "error: interrupted by SIGINT")}  # of the job's process


def interrupted_after(module: str, number: int, *command: str) -> tuple[int, str]:
    """Send SIGINT once a module has been imported for the `number`-th time; the exit code, and what was printed."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stderr is not None
    printed, seen = "", 0
    for line in process.stderr:
        if not line.startswith("import time:"):
            printed += line
        elif line.rpartition("|")[2].strip() == module:
            seen += 1
            if seen == number:
                os.kill(process.pid, signal.SIGINT)
    assert seen >= number, printed
    return process.wait(timeout=120), printed


def assert_quiet(found: tuple[int, str], said: str) -> None:
    assert found[0] == 130, found
    assert not {"Traceback", "Error", "Exception", "KeyboardInterrupt"} & set(re.findall(r"\w+", found[1])), found
    assert said in found[1], found


def test_an_interrupt_while_libraries_are_imported_is_quiet() -> None:
    assert interrupted_after("attnlab.errors", 1, "-m", "attnlab") == (130, "")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["attnlab", "src.run"])
@pytest.mark.parametrize("module", IMPORTS)
def test_an_interrupt_at_any_moment_of_the_imports(module: str, program: str, tmp_path: Path) -> None:
    number, said = IMPORTS[module]
    where = (f"hydra.run.dir={tmp_path / 'run'}", f"cache_dir={tmp_path / 'cache'}")
    assert_quiet(interrupted_after(module, number, "-m", program, "task=wikitext2", *where), said)


@pytest.mark.slow
@pytest.mark.parametrize("module", CHILD)
def test_an_interrupt_while_a_job_of_a_multirun_is_importing(module: str, tmp_path: Path) -> None:
    number, said = CHILD[module]
    where = (f"hydra.sweep.dir={tmp_path / 'run'}", f"cache_dir={tmp_path / 'cache'}")
    found = interrupted_after(module, number, "-m", "attnlab", "-m", "task=wikitext2", "seed=1,2", *where)
    assert_quiet(found, said)
    assert "job 0: starts" in found[1] and "job 1" not in found[1], found


@pytest.mark.slow
def test_an_interrupt_at_random_moments(tmp_path: Path) -> None:
    """From 0.15 s on, when Python itself has started."""
    rng = random.Random(0)
    where = (f"hydra.run.dir={tmp_path / 'run'}", f"cache_dir={tmp_path / 'cache'}")
    for _ in range(20):
        process = subprocess.Popen(
            [sys.executable, "-m", "attnlab", "task=wikitext2", *where], stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        wait = rng.uniform(0.15, 6)
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=120)[1]
        assert process.returncode == 130 and "Traceback" not in printed and "Exception" not in printed, (wait, printed)


def test_the_end_of_an_interrupted_run_waits_for_no_thread() -> None:
    """Neither for a thread of Python, nor does it lose what was printed or what others registered."""
    code = (
        "import atexit, threading, time; from attnlab.cli import leave; "
        "threading.Thread(target=time.sleep, args=(60,)).start(); "
        "atexit.register(lambda: print('registered')); print('printed'); leave(130)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout) == (130, "printed\nregistered\n"), ended.stderr
