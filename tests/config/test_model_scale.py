"""With model= a language model has the defaults of a pretrained one; sample recipes belong to sample models."""

import json
from pathlib import Path
from typing import Any

import pytest

from attnlab.config.check import compose
from attnlab.errors import ConfigError

SIZES = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 30, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 8192,
}  # fmt: skip


def composed(folder: Path, *words: str, **sizes: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(SIZES | sizes))
    return compose(*words, f"model={folder}")


@pytest.mark.parametrize(
    ("words", "corpus"),
    [
        (["task=wikitext2"], "WikiTextRaw"),
        (["task=wikitext103"], "WikiTextRaw"),
        (["task=ptb"], "PennTreebank"),
        (["task=lm1b"], "BillionWords"),
        (["task=fineweb_edu"], "FineWebEdu"),
        (["experiment=own/text", "data_root=."], "TextFiles"),
        (["experiment=convert/wikitext2"], "WikiTextRaw"),
        (["experiment=convert/needle", "convert=mla"], "WikiTextRaw"),
        (["experiment=convert/quick"], "WikiTextRaw"),
        (["task=wikitext2", "mode=test"], "WikiTextRaw"),
        (["task=wikitext2", "convert=mla"], "WikiTextRaw"),
    ],
)
def test_windows_and_text_are_those_of_a_pretrained_model(words: list[str], corpus: str, tmp_path: Path) -> None:
    cfg = composed(tmp_path, *words)
    data = cfg.task.data
    assert (cfg.scale, cfg.choices.scale) == ("pretrained", "pretrained")
    assert (data.window, data.eval_window, cfg.task.score.sliding_stride) == (2048, None, None)
    assert (data.batch_size, data.eval_batch_size) == (1, 2)
    assert data.corpus._target_.endswith(f".{corpus}")
    if cfg.convert:
        assert cfg.convert.calibration.window == 512 and cfg.task.train.batch.tokens == 2048


def test_the_command_line_wins(tmp_path: Path) -> None:
    data = composed(tmp_path, "task=wikitext2", "task.data.window=512").task.data
    assert (data.window, data.batch_size, data.eval_batch_size) == (512, 4, 8)
    data = composed(tmp_path, "task=wikitext2", "task.data.eval_window=4096").task.data
    assert (data.window, data.batch_size, data.eval_batch_size) == (2048, 1, 1)
    cfg = composed(tmp_path, "task=wikitext2", "scale=sample")
    assert (cfg.scale, cfg.task.data.window, cfg.task.score.sliding_stride) == ("sample", 64, 32)
    cfg = composed(tmp_path, "task=fineweb_edu", "scale=paper_small")
    assert (cfg.scale, cfg.task.data.window) == ("paper_small", 1024)
    cfg = composed(tmp_path, "task=wikitext2", "task.data.corpus._target_=attnlab.data.WikiText")
    assert cfg.task.data.corpus._target_ == "attnlab.data.WikiText"
    assert composed(tmp_path, "mode=convert", "task=wikitext2", "convert=mla", "task.data.window=4096").task.data.window
    assert compose("task=wikitext2", "convert=mla").scale == "sample"  # a sample model


@pytest.mark.parametrize("positions", [128, 1000, 1500, 2048])
def test_windows_are_at_most_the_positions_of_the_model(positions: int, tmp_path: Path) -> None:
    words = "task=wikitext2", "convert=mla"
    cfg = composed(tmp_path, *words, max_position_embeddings=positions)
    window, tokens = cfg.task.data.window, 2048 // positions * positions
    assert window == positions and cfg.convert.calibration.window == min(512, positions)
    assert cfg.task.data.eval_batch_size * window <= 4096
    assert cfg.convert.healing.tokens == cfg.task.train.batch.tokens == tokens
    if tokens != 2048:  # a number that is given stays
        with pytest.raises(ConfigError, match="^convert.healing.tokens=2048: expected a multiple"):
            composed(tmp_path, *words, "convert.healing.tokens=2048", max_position_embeddings=positions)


@pytest.mark.parametrize("words", [["task=wikitext2"], ["task=ptb", "convert=mla"], ["task=lm1b", "model=null"]])
def test_the_scale_of_a_pretrained_model_needs_one(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="^scale=pretrained: give model="):
        compose(*words, "scale=pretrained")


@pytest.mark.parametrize("value", ["${task.data.batch_size}", "${nope}", "${div:7,2}"])
def test_a_reference_that_leads_nowhere_is_one_line(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task.data.window"):
        composed(tmp_path, "task=wikitext2", f"task.data.window={value}")


def test_a_model_of_another_task_implies_no_scale(tmp_path: Path) -> None:
    for task in ("reasoning", "imagenet"):
        (tmp_path / task).mkdir()
        assert compose(f"task={task}", f"model={tmp_path / task}").scale == "sample"
    with pytest.raises(ConfigError, match="task=mustc has no scale=pretrained"):
        compose("task=mustc", "scale=pretrained")
