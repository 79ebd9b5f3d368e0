"""python -m tests.seconds: CPU seconds of common commands, user and system, children included, as a table in Markdown.

They run in a temporary folder on the sample corpora, which a first command of each task prepares. A busy machine raises
the numbers, so its load is printed below the table.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
SPEECH = ("task=mustc", "hardware=cpu", "task.train.max_steps=1", "task.decode.beam=1")
TEXT = ("task=wikitext2", "hardware=cpu")
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
CONVERTED = ("model=llama", "convert=mla", "convert.keep=0.5")
ROWS: Sequence[tuple[str, str, float, tuple[str, ...]]] = (  # the row, when it is measured, the goal, the command
    ("First line of a run", "stderr", 0.8, (*SPEECH, "hydra.run.dir=first")),
    ("`data_root` that is missing", "end", 1.0, (*SPEECH, "data_root=missing")),
    ("Translation, one update, whole", "end", 7.0, (*SPEECH, "hydra.run.dir=speech")),
    ("Predict one WAV: the answer", "stdout", 3.5, ("mode=predict", "checkpoint=speech", "input={wav}")),
    ("Predict one WAV: the end", "end", 3.7, ("mode=predict", "checkpoint=speech", "input={wav}")),
    ("Language model, one update, whole", "end", 7.0, (*TEXT, "task.train.max_steps=1", "hydra.run.dir=text")),
    ("Export it", "end", 5.0, ("mode=export", "checkpoint=text")),
    ("Generate with it", "end", 4.0, ("mode=generate", "checkpoint=text")),
    ("Describe it", "end", 3.0, ("mode=describe", *TEXT)),
    ("Describe a converted Llama", "end", 3.0, ("mode=describe", *TEXT, *CONVERTED)),
    ("Sweep of 4 jobs of 20 updates", "end", 40.0, ("-m", *TEXT, "task.train.max_steps=20", "seed=1,2,3,4")),
)


def seconds(until: str, command: Sequence[str], folder: Path) -> float:
    """CPU seconds of a command until its end, or until the first line of the stream "stdout" or "stderr"."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "log").open("a+") as log:
        streams = {name: subprocess.PIPE if name == until else log for name in ("stdout", "stderr")}
        words = [sys.executable, "-m", "attnlab", *command]
        with subprocess.Popen(words, cwd=folder, env=environment, text=True, **streams) as process:  # type: ignore[call-overload]
            if until != "end":
                getattr(process, until).readline()
                used = sum(psutil.Process(process.pid).cpu_times()[:4])
                process.communicate()
                return float(used)
            used = 0.0
            with contextlib.suppress(ChildProcessError):  # none is left
                while True:
                    _, _, usage = os.wait4(-1, 0)  # with the children that it has waited for
                    used += usage.ru_utime + usage.ru_stime
            return used


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # it then waits for the server of a sweep's jobs
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "llama").mkdir()
        (folder / "llama" / "config.json").write_text(json.dumps(LLAMA))
        for task in (SPEECH, (*TEXT, "task.train.max_steps=1")):
            seconds("end", task, folder)
        cache = Path(os.environ.get("ATTNLAB_CACHE", "~/.cache/attnlab")).expanduser()
        wav = next(cache.glob("speech-translation-*/**/*.wav"))
        print("| Command | Goal | CPU seconds |\n| --- | ---: | ---: |")
        for name, until, goal, command in ROWS:
            words = [word.format(wav=wav) for word in command]
            print(f"| {name} | {goal:.1f} | {seconds(until, words, folder):.1f} |", flush=True)
    print(f"\n{psutil.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
