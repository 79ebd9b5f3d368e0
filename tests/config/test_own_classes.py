"""Classes of a person, from a package outside attnlab: they are trained with, and nothing of attnlab changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.runs import TEXT

PACKAGE = {
    "attention.py": """
from attnlab.attention import MHA


class Loud(MHA):
    def __init__(self, d_model: int, num_heads: int, loudness: float = 1.0) -> None:
        super().__init__(d_model, num_heads)
        self.loudness = loudness

    def _queries(self, x, angles):
        return self.loudness * super()._queries(x, angles)
""",
    "data.py": """
from pathlib import Path

from attnlab.data.corpus import Reader, Utterance


class Numbers(Reader):
    name, unit, kinds, layout = "numbers", "lines", ("text",), "data_root must hold train, dev and test"

    def __init__(self, reverse: bool = False) -> None:
        self.reverse = reverse

    def find(self, root: Path, split: str, kind: str) -> None:
        if not (root / split).is_file():
            self.missing(root / split)

    def read(self, root: Path, split: str, kind: str, drop_empty: bool) -> list[Utterance]:
        lines = (root / split).read_text().splitlines()
        return [
            Utterance(id=str(i), source=line, target=line[::-1] if self.reverse else line)
            for i, line in enumerate(lines)
        ]
""",
    "training.py": """
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback


class Slow(torch.optim.Adam):
    def __init__(self, params, lr: float = 1e-3, slowness: int = 2, **keys) -> None:
        super().__init__(params, lr=lr / slowness, **keys)


class Count(Callback):
    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.file.write_text(f"{trainer.global_step} {type(trainer.optimizers[0]).__name__}")
""",
}
FILES = {
    "attention/loud.yaml": """
_target_: custom.attention.Loud
d_model: ${task.model.d_model}
num_heads: ${task.attention_heads}
loudness: 2.0
""",
    "callbacks/count.yaml": """
# @package callbacks.count
_target_: custom.training.Count
file: ???
""",
    "experiment/custom.yaml": """
# @package _global_
defaults:
  - override /task: xsum
  - override /attention: loud
  - override /callbacks: [count]
task:
  name: numbers
  score: bleu
  data: {reader: {_target_: custom.data.Numbers, reverse: true}, vocab_size: 24}
  optimizer: {_target_: custom.training.Slow, _partial_: true, lr: 0.1, slowness: 4}
""",
}
TINY = f"""{TEXT} task.model.encoder.num_heads=2 task.model.decoder.projector_dim=8 task.train.batch.frames=120
task.train.batch.bucket=120 task.train.max_steps=4 task.train.validate_every=4 task.decode.beam=2"""


def written(folder: Path) -> Path:
    for name, text in PACKAGE.items():
        (folder / "custom").mkdir(parents=True, exist_ok=True)
        (folder / "custom" / name).write_text(text)
    for name, text in FILES.items():
        (folder / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "conf" / name).write_text(text.lstrip("\n"))
    (folder / "corpus").mkdir()
    for split, count in (("train", 60), ("dev", 6), ("test", 6)):
        lines = (" ".join(str((7 * i + j) % 10) for j in range(6)) for i in range(count))
        (folder / "corpus" / split).write_text("".join(f"{line}\n" for line in lines))
    return folder


def attnlab(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "attnlab", f"--config-dir={folder / 'conf'}", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_own_attention_reader_optimizer_and_callback(tmp_path: Path) -> None:
    folder = written(tmp_path)
    words = [f"data_root={folder / 'corpus'}", f"callbacks.count.file={folder / 'count'}", f"cache_dir={folder / 'c'}"]
    done = attnlab(folder, "experiment=custom", "hardware=cpu", "hydra.run.dir=run", *words, *TINY.split())
    assert done.returncode == 0, done.stderr
    record = json.loads((folder / "run" / "record.json").read_text())
    assert (record["status"], record["task"], record["attention"]) == ("finished", "numbers", "loud")
    assert record["quality"]["sentences"] == 6
    assert (folder / "count").read_text() == "4 Slow"
    again = attnlab(folder, "mode=test", "checkpoint=run", "hydra.run.dir=again")
    assert again.returncode == 0, again.stderr
    scored = json.loads((folder / "again" / "record.json").read_text())
    assert scored["quality"]["bleu"] == record["quality"]["bleu"]
    wrong = attnlab(folder, "experiment=custom", "attention.loudnes=3", *words)
    assert wrong.returncode == 2 and "nearest: attention.loudness" in wrong.stderr
