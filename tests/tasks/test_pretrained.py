"""A pretrained model in lm-evaluation-harness: the requests and values of the harness's own class for transformers."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from attnlab.config.check import check
from attnlab.pretrained import huggingface
from attnlab.run.device import autocast
from attnlab.run.loading import load
from attnlab.tasks.base import task_of
from attnlab.tasks.harness import TrainedRun
from attnlab.tasks.language_modelling.task import LanguageModellingTask
from tests.pretrained.tokens import FIRST, KINDS, TEXTS, pretrained

PAIRS = [
    ("The sun is", " in the house."), ("", "A house"), ("The number ", "of the man"), (f"{FIRST}The sun", " is"),
    ("The man is\n", "12"), (" ".join(3 * TEXTS), " The sun"), ("sün", " über"),
]  # fmt: skip
MODELS = os.environ.get("ATTNLAB_MODELS", "")
QUICK = ("bos", "gpt2")


def both(folder: Path) -> tuple[TrainedRun, HFLM]:
    cfg = check(["task=wikitext2", "mode=evaluate", "hardware=cpu", f"model='{folder}'"], load).jobs[0]
    return TrainedRun(task_of(cfg, LanguageModellingTask).restore(), 3), HFLM(str(folder), device="cpu", batch_size=1)


def requests(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=args) for args in arguments]


@pytest.mark.parametrize(
    "kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in QUICK)]
)
def test_requests_and_values_are_those_of_the_harness(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, known = both(pretrained(tmp_path, kind))
    asked: dict[Any, list[Any]] = {}
    for lm in (run, known):
        rows = asked[lm] = []
        score = lm._loglikelihood_tokens

        def scored(requests: Any, *args: Any, rows: Any = rows, score: Any = score, **options: Any) -> Any:
            rows += [[list(ids) for ids in request[1:]] for request in requests]
            return score(requests, *args, **options)

        monkeypatch.setattr(lm, "_loglikelihood_tokens", scored)
    own, other = (lm.loglikelihood(requests(*PAIRS), disable_tqdm=True) for lm in (run, known))
    assert [value for value, _ in own] == pytest.approx([value for value, _ in other], abs=1e-4)
    assert [best for _, best in own] == [best for _, best in other]
    texts = [(text,) for text in (TEXTS[0], " ".join(3 * TEXTS), FIRST + TEXTS[1], "ä")]
    values = [lm.loglikelihood_rolling(requests(*texts), disable_tqdm=True) for lm in (run, known)]
    assert values[0] == pytest.approx(values[1], rel=1e-6, abs=1e-4)
    assert asked[run] == asked[known] and len(asked[run]) > len(PAIRS) + len(texts)
    free: dict[str, Any] = {"until": [], "max_gen_toks": 20}
    contexts = ["The sun is", "A house of\n", " ".join(TEXTS)]
    texts_of = [lm.generate_until(requests(*((text, free) for text in contexts)), True) for lm in (run, known)]
    assert texts_of[0] == texts_of[1]
    stop = {"until": [texts_of[0][0][3:5]], "max_new_tokens": 20, "do_sample": False}
    assert run.generate_until(requests((contexts[0], stop))) == known.generate_until(
        requests((contexts[0], stop)), True
    )


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_sharded_folder_in_half_precision_is_read_in_float32(stored: torch.dtype, tmp_path: Path) -> None:
    """And decodes in what hardware.precision says."""
    plain = huggingface.load(str(pretrained(tmp_path / "plain", "bos")))
    half: Any = plain.to(stored)
    half.save_pretrained(tmp_path / "half", max_shard_size="40KB")
    huggingface.tokenizer(str(tmp_path / "plain")).save_pretrained(tmp_path / "half")
    assert len(list((tmp_path / "half").glob("model-*.safetensors"))) > 1
    words, ids = ["task=wikitext2", "mode=generate", f"model='{tmp_path / 'half'}'"], torch.arange(3, 9)[None]
    for precision, dtype in {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}.items():
        cfg = check([*words, "hardware=cpu", f"hardware.precision={precision}"], load).jobs[0]
        task = task_of(cfg, LanguageModellingTask)
        module = task.restore()
        assert {value.dtype for value in module.model.parameters()} == {torch.float32}
        with autocast(torch.device("cpu"), task.predictor(module).dtype):
            out = module.model(ids)
        assert out.dtype == dtype
        expected = huggingface.load(str(tmp_path / "half"), dtype=torch.float32)(ids).logits
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.5)


@pytest.mark.slow
@pytest.mark.skipif(not MODELS, reason="reads ATTNLAB_MODELS, a folder of pretrained models")
def test_values_of_smollm2_are_those_of_the_harness() -> None:
    run, known = both(Path(MODELS) / "smollm2_135m")
    own, other = (lm.loglikelihood(requests(*PAIRS), disable_tqdm=True) for lm in (run, known))
    assert [value for value, _ in own] == pytest.approx([value for value, _ in other], abs=1e-3)
    assert [best for _, best in own] == [best for _, best in other]
    texts = requests((TEXTS[0],), ("",), ("The\n\nsün",))
    values = [lm.loglikelihood_rolling(texts, disable_tqdm=True) for lm in (run, known)]
    assert values[0] == pytest.approx(values[1], abs=1e-3)
    asked = requests(("Question: what is 2 + 2?\nAnswer:", {"until": ["\n"], "max_gen_toks": 12}))
    assert run.generate_until(asked, True) == known.generate_until(asked, True)


@torch.no_grad()
def test_generation_ends_where_the_harness_ends(tmp_path: Path) -> None:
    """At each end of the generation config."""
    folder = pretrained(tmp_path, "bos")
    _, known = both(folder)
    text = known.generate_until(requests(("The sun is", {"until": [], "max_gen_toks": 20})), True)[0]
    prompt = torch.tensor([known.tok_encode("The sun is")])
    ids = known.model.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :].tolist()
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [2, {ids[10]}]}}')
    pair = [lm.generate_until(requests(("The sun is", {"until": [], "max_gen_toks": 20})), True) for lm in both(folder)]
    assert pair[0] == pair[1] and len(pair[0][0]) < len(text)
