"""mode=generate of a pretrained model: the tokens of transformers' `generate`."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from attnlab.config.check import check
from attnlab.errors import DataError, printable
from attnlab.modes import generate
from attnlab.run.loading import load
from attnlab.run.record import new
from tests.pretrained.tokens import KINDS, of_transformers, pretrained

MODELS = os.environ.get("ATTNLAB_MODELS", "")
QUICK = ("bos", "gpt2")
PROMPTS = ["The sun is", "", "A house of\nthe  sün"]


def greedy(model: Any, words: Any, prompt: str, tokens: int = 24) -> tuple[list[int], str]:
    """The new ids of transformers and their text."""
    ids = words(prompt, return_tensors="pt").input_ids.long()
    if not ids.numel():
        ids = torch.tensor([[words.eos_token_id if words.bos_token_id is None else words.bos_token_id]])
    mask = torch.ones_like(ids)
    row = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens)[0].tolist()
    whole, before = (words.decode(part, skip_special_tokens=True) for part in (row, ids[0].tolist()))
    return row[ids.shape[1] :], whole[len(before) :]


def config_of(folder: Path) -> Any:
    settings = ["hardware=cpu", f"model='{folder}'", "task.sampling.temperature=0", "task.sampling.tokens=24"]
    cfg = check(["task=wikitext2", "mode=generate", *settings], load).jobs[0]
    OmegaConf.set_readonly(cfg, False)
    return cfg


def generated(cfg: Any, prompt: str) -> dict[str, Any]:
    """The section of a record."""
    cfg.prompt = prompt
    record = new(cfg, "test")
    generate.run(cfg, record, None)
    section: dict[str, Any] = record["generation"]
    return section


def written(prompt: str, text: str, ids: list[int], model: Any) -> dict[str, Any]:
    """The same by the text of transformers, which is cut where no end token stands at its end."""
    ends = model.generation_config.eos_token_id
    cut = len(ids) == 24 and ids[-1] not in (ends if isinstance(ends, list) else [ends])
    return {"prompt": prompt, "text": text, "tokens": len(ids)} | ({"cut": True} if cut else {})


@pytest.mark.parametrize("kind", [*QUICK, *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k not in QUICK)])
def test_a_pretrained_model_continues_as_in_transformers(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the generation config names tokens at which it ends."""
    folder = pretrained(tmp_path, kind)
    cfg, (model, words) = config_of(folder), of_transformers(folder)
    for prompt in PROMPTS:
        ids, text = greedy(model, words, prompt)
        assert generated(cfg, prompt) == written(prompt, text, ids, model)
        assert capsys.readouterr().out == printable(f"{prompt}{text}\n", keep="\n")
    ends = [max({*ids}, key=ids.index), ids[0]] if kind == "bos" else sorted({*ids}, key=ids.index)[-2:]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    model.generation_config.eos_token_id = ends
    ids, text = greedy(model, words, prompt)
    assert generated(cfg, prompt) == written(prompt, text, ids, model)
    assert ids[-1] in ends and len(ids) < 24


@pytest.mark.slow
@pytest.mark.skipif(not MODELS, reason="reads ATTNLAB_MODELS, a folder of pretrained models")
def test_smollm2_continues_as_in_transformers() -> None:
    folder = Path(MODELS) / "smollm2_135m"
    cfg, (model, words) = config_of(folder), of_transformers(folder)
    chat = words.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    for prompt in ("The capital of France is", "", chat):
        ids, text = greedy(model, words, prompt)
        assert generated(cfg, prompt) == written(prompt, text, ids, model)
    assert text == "The capital of France is Paris." and len(ids) == 8


def test_settings_that_are_not_applied_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = pretrained(tmp_path, "bos")
    cfg = config_of(folder)
    file = folder / "generation_config.json"
    for values in (
        {"eos_token_id": 2, "repetition_penalty": 1.5},
        {"eos_token_id": 2, "top_p": 0.5, "do_sample": True},
    ):
        file.write_text(json.dumps(values))
        caplog.clear()
        section = generated(cfg, "The")
        values.pop("eos_token_id")
        assert section["left_out"] == values
        named = [message for message in caplog.messages if "not applied" in message]
        assert len(named) == 1 and all(name in named[0] for name in values)


def test_a_damaged_generation_config_is_refused(tmp_path: Path) -> None:
    folder = pretrained(tmp_path, "bos")
    wrong = ['"two"', "[1, -3]", "true", "2.0", "[[2]]", '{"a": 1}', "1e400", "1" + 30 * "0"]
    cfg = config_of(folder)
    for content in (
        "[1]",
        "{",
        "",
        "null",
        "\x00",
        "[" * 100_000,
        *(f'{{"eos_token_id": {value}}}' for value in wrong),
    ):
        (folder / "generation_config.json").write_text(content)
        with pytest.raises(DataError, match=r"generation_config\.json: ") as error:
            generated(cfg, "The")
        assert "\n" not in str(error.value), content[:20]
