"""Ctrl-C, once, ends every phase of a run within seconds: exit code 130, one line, nothing left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.run.test_sweep import wait_for

LONGEST = 12.0  # seconds, on a machine that is busy; four on a free one

SPEECH = ("task=mustc", "hardware=cpu")
SHORT = ("task=wmt16", "hardware=cpu", "task.train.max_steps=2", "task.train.validate_every=2")
PHASES = {  # a phase: the command, the line after which the signal is sent, and how many seconds later
    "sample speech": (SPEECH, "NO data_root", 2.0),
    "features": (SPEECH, "corpus: MuST-C", 1.0),
    "pretraining of images": (("task=imagenet", "compress=irratt", "rank=32"), "from scratch", 3.0),
    "pretraining of text": (("task=reasoning", "compress=tensorllm"), "training a small", 3.0),
    "fit": (("task=wikitext2", "hardware=cpu"), "per update, 1 process", 3.0),
    "decoding of the test set": (SHORT, "kept the best checkpoint", 2.0),
    "bench": (("task=wikitext2", "mode=bench", "bench.what=[training]"), "", 9.0),
    "multirun": (("-m", "task=wikitext2", "hardware=cpu", "seed=1,2"), "per update, 1 process", 3.0),
}


def started(*words: str, errors: Any = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, text=True, start_new_session=True)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_one_interrupt_ends_a_phase(phase: str, tmp_path: Path) -> None:
    arguments, pattern, seconds = PHASES[phase]
    where = f"hydra.{'sweep' if '-m' in arguments else 'run'}.dir={tmp_path / 'run'}"
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = started("-m", "attnlab", *arguments, where, f"cache_dir={tmp_path / 'cache'}", errors=errors)
    wait_for(lambda: re.search(pattern, log.read_text()), process, log.read_text)
    time.sleep(seconds)
    assert process.poll() is None, log.read_text()
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    began = time.monotonic()
    code = process.wait(timeout=120)
    took, seen = time.monotonic() - began, log.read_text()
    assert code == 130, seen
    assert took < LONGEST, f"{took:.1f} s\n{seen}"
    assert seen.count("error: interrupted by SIGINT") == 1 and "Traceback" not in seen, seen
    assert not psutil.wait_procs(children, timeout=5)[1], "processes were left behind"
    records = [json.loads(path.read_text()) for path in (tmp_path / "run").rglob("record.json")]
    assert [record["status"] for record in records] == ["interrupted"]


IMPORTS = {  # imported module, after which the signal is sent: what is printed besides the imports
    "attnlab.errors": "",
    "attnlab.cli": "",
    "torch": "error: interrupted by SIGINT",
    "lightning": "error: interrupted by SIGINT",
}
SLOW = [pytest.param(module, marks=[pytest.mark.slow] * (module != "attnlab.errors")) for module in IMPORTS]


@pytest.mark.parametrize("module", SLOW)
def test_an_interrupt_while_libraries_are_imported_is_quiet(module: str, tmp_path: Path) -> None:
    words = ("task=wikitext2", f"hydra.run.dir={tmp_path / 'run'}", f"cache_dir={tmp_path / 'cache'}")
    process = started("-X", "importtime", "-m", "attnlab", *words)
    assert process.stderr is not None
    printed, sent = "", False
    for line in process.stderr:
        if not line.startswith("import time:"):
            printed += line
        elif not sent and line.rpartition("|")[2].strip() == module:
            os.kill(process.pid, signal.SIGINT)
            sent = True
    assert sent and process.wait(timeout=120) == 130, printed
    assert not {"Traceback", "Error", "Exception", "KeyboardInterrupt"} & set(re.findall(r"\w+", printed)), printed
    assert IMPORTS[module] in printed


def test_the_end_of_an_interrupted_run_waits_for_no_thread() -> None:
    """Neither for a thread of Python, nor does it lose what was printed or what others registered."""
    code = (
        "import atexit, threading, time; from attnlab.cli import leave; "
        "threading.Thread(target=time.sleep, args=(60,)).start(); "
        "atexit.register(lambda: print('registered')); print('printed'); leave(130)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout) == (130, "printed\nregistered\n"), ended.stderr
