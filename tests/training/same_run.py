"""Five tiny models trained on this process's share of each update: `python -m tests.training.same_run FOLDER`.

The processes of one run are started by the test with torchrun's environment variables.
"""

import csv
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import lightning as L
import numpy as np
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from attnlab.config.check import compose
from attnlab.data.samples import markov
from attnlab.pretrained.timm import VisionTransformer
from attnlab.run.record import new
from attnlab.tasks.base import Trains, task_of
from attnlab.training.module import Module
from attnlab.training.trainer import fit, process_count
from tests.command import weights
from tests.data.conftest import RATE, write_split
from tests.golden.runs import TEXT

UPDATES = 20
ENGLISH, GERMAN = ("one", "two", "three"), ("eins", "zwei", "drei")
SENTENCES = [*TEXT.split(), "task.train.keep_best=1", "task.model.encoder.dropout=0", "task.model.decoder.dropout=0"]
SPEECH = [
    "task=mustc", "attention=mtla", *SENTENCES, "task.model.encoder.num_heads=2", "task.model.encoder.conv_channels=16",
    "task.model.encoder.conv_kernels=[5]", "task.model.decoder.projector_dim=8", "task.train.batch.bucket=400",
    "task.train.batch.split=false",
]  # fmt: skip
LINES: dict[str, list[str]] = {
    "language model": [
        "task=wikitext2", "attention=mha", "task.model.d_model=16", "task.attention_heads=2",
        "task.schedule.warmup_steps=2", "task.model.num_layers=1", "task.model.max_length=48", "task.data.window=16",
        "task.train.batch.tokens=128", "task.data.batch_size=4", "task.score.sliding_stride=8",
    ],
    "translation": [
        "task=wmt16", "attention=mha", *SENTENCES, "task.model.decoder.num_heads=2", "task.data.vocab_size=40",
        "task.train.batch.frames=180", "task.train.batch.bucket=60", "task.train.validate_decode=5",
        "task.train.validate_score=wer", "task.train.validate_search.beam=1", "task.train.validate_search.max_len_b=6",
        "task.train.monitor=val_wer",
    ],
    "conformer": [*SPEECH, "task.train.batch.frames=1600"],
    "one bucket": [*SPEECH, "task.train.batch.frames=400"],
    "images": [
        "task=imagenet", "task.model.embed_dim=24", "task.model.depth=2", "task.model.num_heads=3",
        "task.model.patch_size=16", "task.data.sample_train=4", "task.data.sample_val=1", "task.data.no_aug=false",
        "task.data.repeats=2", "task.mixup.mixup_alpha=0.8", "task.mixup.cutmix_alpha=1.0", "task.ema_decay=0.5",
        "task.train.batch.images=16", "task.data.batch_size=8", "task.train.max_epochs=7",
    ],
}  # fmt: skip


def write_corpora(folder: Path) -> None:
    """Everything that the processes read, written before they start."""
    words = random.Random(1)
    for split, count in {"train": 90, "dev": 8, "test": 8}.items():
        lengths = [words.randint(1, 12) for _ in range(count)]
        for language, letters in {"en": "abcdef", "de": "uvwxyz"}.items():
            lines = [" ".join(words.choices(letters, k=length)) for length in lengths]
            (folder / "text").mkdir(parents=True, exist_ok=True)
            (folder / "text" / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines))
    tones = np.random.default_rng(1)
    for split, count in {"train": 44, "dev": 4, "tst-COMMON": 4}.items():
        seconds = tones.uniform(0.4, 1.6, count).round(2)
        talk = tones.normal(0, 0.1, RATE * (int(seconds.sum()) + 1))
        texts = [
            [" ".join(words.choices(spoken, k=words.randint(1, 3))) for spoken in (ENGLISH, GERMAN)]
            for _ in range(count)
        ]
        starts = (np.cumsum(seconds) - seconds).round(2)
        segments = [("ted_1.wav", *times, *both) for *times, both in zip(starts, seconds, texts, strict=True)]
        write_split(folder / "speech" / "en-de" / "data" / split, {"ted_1.wav": talk}, segments)
    torch.manual_seed(1)
    model = VisionTransformer("vit_tiny_patch16_224", None, 32, 16, 24, 2, 3).create(12)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "start.safetensors")


def train(name: str, corpora: Path, directory: Path, processes: int) -> dict[str, Any]:
    """The loss and the items of each update, and a sum over all weights and statistics after the last one."""
    settings = [*LINES[name], f"cache_dir='{corpora}/cache'", "hardware=ddp", "hardware.accelerator=cpu"]
    settings += [f"hardware.devices={processes}", "task.train.log_every=1", f"task.train.max_steps={UPDATES}"]
    if name == "images":
        settings += [f"model='{corpora}/start.safetensors'"]
    elif name != "language model":
        settings += [f"data_root='{corpora}/{'text' if name == 'translation' else 'speech'}'"]
    cfg = compose(*settings)
    OmegaConf.set_readonly(cfg, False)
    OmegaConf.set_struct(cfg, False)
    cfg.hardware.precision = "64-true"
    if "task.train.batch.split=false" in settings:
        encoder = {key: value for key, value in cfg.task.model.encoder.items() if not key.endswith("n_dropout")}
        cfg.task.model.encoder = encoder | {"_target_": "attnlab.models.ConformerEncoder", "kernel": 3}
    assert process_count(cfg) == processes
    task, record = task_of(cfg, Trains), new(cfg, "test")
    task.check(directory)
    L.seed_everything(1, workers=True, verbose=False)
    data, module = task.prepare(record, None)
    task.before_fit(record, directory, data, module)
    items: list[int] = []
    training = fit(cfg, directory, data, watched(module, items), monitor=task.monitor, better=task.better, resume=None)
    results: dict[str, Any] = {"items": items}
    if int(os.environ.get("RANK", 0)) == 0:
        with open(directory / "curves" / "metrics.csv", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        results["loss"] = [float(row["loss"]) for row in rows if row["loss"]]
        results["wer"] = [float(row["val_wer"]) for row in rows if row.get("val_wer")]
        results["chosen"] = sorted(path.name for path in (directory / "checkpoints").glob("step*.ckpt"))
        results["final_loss"] = training["final_loss"]
        results["weights"] = {key: float(value.double().abs().sum()) for key, value in weights(directory).items()}
        results["batches"] = data.batches_per_update(processes)
    return results


def watched(module: Module, items: list[int]) -> Module:
    """The module, which adds the items of each update to a list."""
    clip = module.configure_gradient_clipping

    def counted(*arguments: Any, **options: Any) -> None:
        clip(*arguments, **options)
        items.append(int(module.pending.sums[-1][2]))

    module.configure_gradient_clipping = counted  # type: ignore[method-assign]
    return module


def run(corpora: Path, directory: Path, processes: int) -> None:
    markov.LINES = {"train": 120, "validation": 10, "test": 10}
    results = {name: train(name, corpora, directory / name.replace(" ", "-"), processes) for name in LINES}
    if int(os.environ.get("RANK", 0)) == 0:
        (directory / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), int(os.environ.get("WORLD_SIZE", 1)))
