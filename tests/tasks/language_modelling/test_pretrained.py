"""Windows, calibration texts, prompts and needles of a pretrained model begin as its tokenizer begins a text."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab.config.check import check
from attnlab.conversion import Calibration
from attnlab.conversion.texts import calibration_tokens, scale_tokens
from attnlab.data.samples import markov
from attnlab.modes import test as scored
from attnlab.run.loading import load
from attnlab.run.record import new
from attnlab.tasks.language_modelling.needle import Needle
from attnlab.tasks.language_modelling.task import LanguageModellingTask
from tests.pretrained.tokens import KINDS, of_transformers, pretrained
from tests.tasks.conftest import recorded

SETTINGS = ["hardware=cpu", "task=wikitext2", "task.data.window=16", "task.data.eval_batch_size=4"]
SCORE = ["task.score.sliding_stride=8", "task.score.prompt_tokens=8", "task.score.continuations=2"]
MODELS = os.environ.get("ATTNLAB_MODELS", "")
Make = Callable[..., tuple[Path, Any]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(markov, "LINES", {"train": 60, "validation": 20, "test": 8})

    def configured(kind: str, *words: str) -> tuple[Path, Any]:
        folder = pretrained(tmp_path / kind, kind)
        words = (*SETTINGS, *SCORE, "task.sampling.tokens=8", f"cache_dir='{tmp_path}/cache'", *words)
        return folder, check([*words, f"model='{folder}'"], load).jobs[0]

    return configured


def texts_of(data: Any, split: str) -> list[str]:
    return list(data.source.texts(data.root, split))


@pytest.mark.parametrize("kind", [k for k in KINDS if k in ("bos", "gpt2", "both", "same")])
def test_windows_begin_as_the_tokenizer_begins_a_text(kind: str, make: Make) -> None:
    folder, cfg = make(kind, "convert=mla", "convert.keep=0.5", "convert.healing.tokens=64")
    record = new(cfg, "test")
    data, module = LanguageModellingTask(cfg).prepare(record, None)
    _, words = of_transformers(folder)
    begins = [] if kind == "gpt2" else [words.bos_token_id]
    stream = []
    for text in texts_of(data, "test"):
        stream += words(text).input_ids + [words.eos_token_id] * (kind in ("bos", "gpt2"))
    file = data.tokens("test")
    assert file.read(0, len(file)).tolist() == stream
    asked = 0
    for tokens, targets in data.test_dataloader()[0]:
        assert (tokens[:, : len(begins)] == torch.tensor(begins)).all()
        asked += int((targets >= 0).sum())
        if kind == "bos":  # given, and never predicted; `same` has one token for both
            assert not (targets == words.bos_token_id).any()
    given = stream[1:].count(words.bos_token_id) if kind in ("bos", "both") else 0
    assert asked == len(stream) - 1 - given
    batch = next(iter(data.train_dataloader()))[0]  # half of them with facts
    rows, about = calibration_tokens(Calibration(tokens=256, window=32), data)
    for first in (batch, rows, scale_tokens(data)):
        assert (first[:, : len(begins)] == torch.tensor(begins)).all()
    assert (f"begins with {words.bos_token}" in about) == bool(begins)
    lengths = Needle(lengths=[64], trials=2, digits=2)
    for trial in lengths.texts(64, data.vocabulary, data.tokens("validation")):
        for depth in (None, 0.0, 0.5, 1.0):
            row = trial.row(depth)
            assert len(row) == 64 and row[: len(begins)] == begins
            assert depth is None or any(row[i : i + len(trial.fact)] == trial.fact for i in range(64))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bos", "gpt2"])
def test_perplexity_is_that_of_the_first_tokens_after_the_beginning(kind: str, make: Make, tmp_path: Path) -> None:
    folder, cfg = make(kind, "mode=test")
    record = recorded(scored, (cfg, new(cfg, "test")), tmp_path)
    model, words = of_transformers(folder)
    data, _ = LanguageModellingTask(cfg).prepare(new(cfg, "test"), "test")
    stream = [i for text in texts_of(data, "test") for i in [*words(text).input_ids, words.eos_token_id]]
    nats, count, begins = 0.0, 0, words.bos_token_id if kind == "bos" else None
    for start in range(0, len(stream) - 1, 16):
        ids = stream[start : start + 17]
        first = ids[:1] if begins is None else [begins]
        logp = model(torch.tensor([first + ids[1:-1]])).logits[0].double().log_softmax(-1)
        asked = [(i, target) for i, target in enumerate(ids[1:]) if target != begins]
        nats, count = nats - sum(float(logp[i, target]) for i, target in asked), count + len(asked)
    quality = record["quality"]
    assert quality["tokens"] == count
    assert quality["perplexity"] == pytest.approx(torch.tensor(nats / count).exp().item(), rel=1e-4)
    assert ("each begins with <s>" in quality["signature"]) == (kind == "bos")
    short, few = quality["warnings"]
    assert "windows of 16 tokens" in short and f"{len(stream):,} tokens are scored" in few
    total = sum(len(text.split()) + text.count("\n") + 1 for text in texts_of(data, "test"))
    predicted = len(stream) - stream.count(begins)
    per_word = torch.tensor(nats / count * predicted / total).exp().item()
    assert quality["perplexity_per_word"] == pytest.approx(per_word, rel=1e-3)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.skipif(not MODELS, reason="reads ATTNLAB_MODELS, a folder of pretrained models")
def test_smollm2_is_scored_on_wikitext_as_papers_do(corpora: Path, tmp_path: Path) -> None:
    """Windows of 2,048 tokens of the whole text, without a word of settings; two of them, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, root = Path(MODELS) / "smollm2_135m", corpora / "lm_wikitext2"
    words = ["task=wikitext2", "mode=test", f"model='{folder}'", f"data_root='{root}'", f"cache_dir='{tmp_path}/cache'"]
    few = ["hardware=cpu", "task.data.eval_windows=2", "task.score.continuations=1", "task.sampling.tokens=2"]
    cfg = check([*words, *few], load).jobs[0]
    quality = recorded(scored, (cfg, new(cfg, "test")), tmp_path / "run")["quality"]
    lines = (root / "wiki.test.tokens").read_text(encoding="utf-8").split("\n")[:-1]
    text = "\n\n".join(f"{line}\n" if line.strip() else "" for line in lines)
    words_of, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor(words_of(text).input_ids)
    nats = []
    for start in (0, 77 * 2048):  # of 154
        logits = model(ids[None, start : start + 2048]).logits[0].float()
        nats.append(torch.nn.functional.cross_entropy(logits, ids[start + 1 : start + 2049]))
    assert quality["tokens"] == 4096
    assert quality["perplexity"] == pytest.approx(float(torch.stack(nats).mean().exp()), rel=1e-4)
