"""Tiny seeded runs, whose losses are saved as text beside this file, a line for each update."""

import csv
import random
from pathlib import Path

from attnlab.config.check import compose
from attnlab.modes import train
from attnlab.run.record import new
from tests.data.conftest import write_corpus

FOLDER = Path(__file__).parent
LANGUAGE = """
task=wikitext2 task.model.d_model=16 task.model.num_layers=1 task.model.max_length=24 task.attention_heads=2
task.data.window=16 task.data.eval_batch_size=64 task.train.batch.tokens=64 task.train.max_steps=20
task.train.validate_every=20 task.schedule.warmup_steps=2 task.score.sliding_stride=8 task.score.prompt_tokens=8
task.score.continuations=1 task.sampling.tokens=4"""
TEXT = """
task.model.d_model=16 task.attention_heads=2 task.model.encoder.num_layers=1 task.model.encoder.ffn_dim=16
task.model.decoder.num_layers=1 task.model.decoder.ffn_dim=16 task.schedule.warmup_steps=2 task.decode.max_len_b=8"""
SPEECH = """
task.model.encoder.num_heads=2 task.model.encoder.conv_channels=16 task.model.decoder.projector_dim=8
task.train.batch.frames=250 task.train.max_epochs=4"""
IMAGES = """
task.model.embed_dim=24 task.model.depth=2 task.model.num_heads=3 task.model.patch_size=16 task.pretrain.epochs=1
task.data.sample_train=2 task.data.sample_val=1 task.train.batch.images=12 task.train.max_epochs=4"""
RUNS = {
    "wikitext2_tpa": f"{LANGUAGE} attention=tpa",
    "wikitext2_multilinear": f"{LANGUAGE} attention=multilinear",
    "mustc_mtla": f"task=mustc attention=mtla {TEXT} {SPEECH}",
    "wmt16_mha": f"task=wmt16 attention=mha {TEXT} task.train.max_epochs=12",
    "imagenet_irratt": f"task=imagenet compress=irratt rank=9 {IMAGES}",
}


def losses(name: str, directory: Path) -> list[float]:
    """Train one of RUNS in a directory; the training loss of each update."""
    words = [*RUNS[name].split(), "hardware=cpu", "task.train.log_every=1", f"cache_dir='{directory}/cache'"]
    if "imagenet" not in name:
        words.append(f"data_root='{corpus(name.partition('_')[0], directory / 'corpus')}'")
    cfg = compose(*words)
    run = directory / "run"
    run.mkdir()
    train.run(cfg, new(cfg, "golden"), run)
    with open(run / "curves" / "metrics.csv", encoding="utf-8", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def corpus(task: str, root: Path) -> Path:
    """A few tones with their translations, or lines of nine words whose order has a rule that can be learned."""
    if task == "mustc":
        return write_corpus(root)
    root.mkdir()
    choices = random.Random(1).choices
    suffixes = {"wikitext2": [""], "wmt16": ["en", "de"]}[task]
    for split, count in (("train", 60), ("valid", 9), ("test", 9)):
        lines = [choices("abcdefgh", k=6) for _ in range(count)]
        for suffix in suffixes:
            texts = [" ".join(sorted(line, reverse=suffix == "de")) for line in lines]
            name = f"wiki.{split}.tokens" if not suffix else f"{split.replace('valid', 'dev')}.{suffix}"
            (root / name).write_text("".join(f" {text} \n" for text in texts))
    return root


def file(name: str) -> Path:
    return FOLDER / f"{name}.txt"
