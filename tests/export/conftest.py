"""Runs of mode=convert on tiny models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnlab.config.check import check
from attnlab.data.samples import markov
from attnlab.data.text.tokenizer import Tokenizer
from attnlab.modes import convert
from attnlab.run.loading import load
from attnlab.run.record import new, write
from tests.pretrained.tokens import TEXTS, pretrained
from tests.tasks.conftest import recorded

DATA = ["task.data.window=16", "task.data.eval_batch_size=64", "task.data.eval_windows=4", "task.sampling.tokens=8"]
SCORE = ["task.score.sliding_stride=8", "task.score.prompt_tokens=8", "task.score.continuations=2"]
CALIBRATION = ["convert.calibration.tokens=128", "convert.calibration.window=32"]
Convert = Callable[..., tuple[Path, Path]]


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Convert:
    monkeypatch.setattr(markov, "LINES", {"train": 60, "validation": 20, "test": 20})

    def make(
        kind: str,
        target: str = "mla",
        *words: str,
        pieces_alone: bool = False,
        generation: dict[str, Any] | None = None,
        sizes: dict[str, Any] | None = None,
    ) -> tuple[Path, Path]:
        """The folder of the model, and the run; `generation`: more settings of its generation config."""
        folder, run = pretrained(tmp_path / "source", kind, **sizes or {}), tmp_path / "run"
        if generation is not None:
            file = folder / "generation_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | generation))
        if pieces_alone:
            sentence_pieces(folder)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ bos_token }}tool")
        settings = ["hardware=cpu", "task=wikitext2", *DATA, *SCORE, *CALIBRATION, f"cache_dir='{tmp_path}/cache'"]
        words = (
            f"model='{folder}'",
            "mode=convert",
            f"convert={target}",
            *(words or ("convert.keep=0.5", "convert.layers=same")),
        )
        cfg = check([*settings, *words], load).jobs[0]
        record = recorded(convert, (cfg, new(cfg, "test")), run)
        write(record | {"status": "finished"}, run)
        return folder, run

    return make


def sentence_pieces(folder: Path) -> None:
    """Replace the tokenizer of a folder by a SentencePiece model, as of Mistral 7B."""
    tokenizer = Tokenizer.train(TEXTS * 20, 60, "bpe")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(tokenizer.model)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    settings = names | {"tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
