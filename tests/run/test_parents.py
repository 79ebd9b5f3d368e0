"""A process ends with the one that started it, however that was ended."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

CHILD = """
import os, signal, sys, time
from attnlab.run import parents
parents.GRACE, parents.EVERY = 0.5, 0.1
kind = sys.argv[1]
if kind == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if kind == "late":
    time.sleep(1)
parents.watch_given_parent()
assert parents.PARENT not in os.environ
def say():
    print("last words", flush=True)
with parents.on_parent_end(say):
    print(os.getpid(), flush=True)
    time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
from attnlab.run.parents import environment
subprocess.Popen([sys.executable, *sys.argv[1:]], env=environment())
print("started", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("obedient", ""),
        ("deaf", "last words\n"),  # the main thread does not come to handle the signal
        ("late", ""),  # its parent ended before it could ask the system
    ],
)
def test_a_child_ends_with_its_killed_parent(kind: str, said: str) -> None:
    command = [sys.executable, "-c", PARENT, "-c", CHILD, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "started\n"
        (child,) = psutil.Process(parent.pid).children()
        if kind != "late":
            assert int(parent.stdout.readline()) == child.pid
        parent.send_signal(signal.SIGKILL)
        began = time.monotonic()
        rest = parent.stdout.read()  # until the child has ended, too
        assert rest == said
        assert time.monotonic() - began < 20
    assert not psutil.wait_procs([child], timeout=5)[1]
