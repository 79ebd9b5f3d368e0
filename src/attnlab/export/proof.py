"""Proof that a serving engine decodes a folder as attnlab does: tokens, log-probabilities, bytes and speed."""

import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlab.decoding import Sampling
from attnlab.errors import ConfigError, DataError
from attnlab.export import serving
from attnlab.models import LanguageModel
from attnlab.pretrained import hub
from attnlab.run.console import waited

CHUNK = 128  # positions that the engine reads in a step: longer prompts are read in chunks, beside others
AGAIN, ALONE = 8, 2  # prompts that are decoded once more, from the prefix cache, and by themselves
BATCH = 64  # rows that attnlab and transformers decode together
ALSO = 16  # prompts that transformers decodes, which expands latents in every step
ENGINE = Path(__file__).with_name("engine.py")


class Margin(NamedTuple):
    """The first token of a prompt that differs, and by how much attnlab prefers its own."""

    prompt: int
    token: int
    margin: float


def check(path: str, tokens: int, longest: int) -> None:
    """ConfigError: this Python cannot import vLLM, or the model is too short for prompts and `tokens` new ones."""
    if longest < tokens + 8:
        raise ConfigError(f"prove.tokens={tokens}: the model reads {longest} positions; give fewer tokens")
    try:
        done = subprocess.run([path, "-c", "import vllm"], capture_output=True, text=True, timeout=300)
    except OSError as error:
        raise ConfigError(
            f"prove.python={path}: {error.strerror}; expected the Python of an environment with vLLM"
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ends with {done.returncode}"])[-1]
        raise ConfigError(f"prove.python={path}: `import vllm` fails there: {last}")


@torch.inference_mode()
def prove(
    model: LanguageModel,
    folder: Path,
    form: serving.Form,
    python: str,
    prompts: int,
    tokens: int,
    num_ids: int,
    end: int,
) -> dict[str, Any]:
    """Decode sampled prompts in the engine, in attnlab and in transformers -> the section `serving` of a record.

    The prompts are sampled from the model, of four lengths. The engine decodes all of them together, so that batches
    are ragged, in chunks, some of them again from its prefix cache, and some alone. (On a CPU vLLM has no chunks and no
    prefix cache for latents.) It scores the tokens that attnlab has chosen, too.

    Args:
        python: the Python of the engine's environment.
        tokens: new tokens of each prompt.
        num_ids: ids from here on are never generated.
        end: id before each text.

    Raises:
        DataError: the engine failed.
    """
    room = min(model.longest - tokens - 1, 2 * CHUNK)  # the engine scores a text and adds a token
    sizes = sorted({max(1, room * share // 8) for share in (1, 2, 4, 8)})
    groups = {size: list(range(i, prompts, len(sizes))) for i, size in enumerate(sizes)}
    asked: list[list[int]] = [[]] * prompts
    for length, places in groups.items():
        for part in _parts(places):
            begin = torch.full((len(part), 1), end)
            drawn = Sampling(length - 1, seed=length)(model, begin, num_ids=num_ids) if length > 1 else begin[:, :0]
            for place, ids in zip(part, torch.cat((begin, drawn), 1).tolist(), strict=True):
                asked[place] = ids
    greedy = Sampling(tokens, temperature=0)
    own, own_seconds = _decoded(asked, groups, lambda ids: greedy(model, ids, num_ids=num_ids))
    scores, margins = _scores(model, asked, own, groups, num_ids)
    question = {
        "folder": str(folder),
        "options": serving.options(form, model, cpu=False),
        "cpu": serving.options(form, model, cpu=True),
        "prompts": asked,
        "tokens": tokens,
        "allowed": None if num_ids == model(torch.tensor([[end]])).shape[-1] else list(range(num_ids)),
        "chunk": CHUNK,
        "again": min(AGAIN, prompts),
        "alone": min(ALONE, prompts),
        "given": [ids + new for ids, new in zip(asked, own, strict=True)],
    }
    answer = _answer(python, question)
    few = {size: [place for place in places if place < ALSO] for size, places in groups.items()}
    other, other_seconds = _transformers(folder, asked[:ALSO], few, tokens)
    differences = [
        Margin(i, j, float(margins[i][j]))
        for i in range(prompts)
        if (j := _first(own[i], answer["tokens"][i])) is not None
    ]
    theirs, ranks = torch.tensor([row[-tokens:] for row in answer["scores"]]).unbind(-1)
    return {
        "engine": f"vLLM {answer['version']}",
        "backend": f"{answer['model']}, {answer['backend']}",
        "device": answer["device"],
        "dtype": answer["dtype"],
        "prompts": prompts,
        "tokens": prompts * tokens,
        "tokens_equal": _equal(own, answer["tokens"]),
        "tokens_first_after_the_same_text": int((ranks == 1).sum()),
        "first_differences": [margin._asdict() for margin in differences],
        "tokens_equal_in_transformers": f"{_equal(own[:ALSO], other)} of {len(other) * tokens}",
        "log_probability_difference": float((theirs - scores).abs().max()),
        "equal_again": answer["again"] == answer["tokens"][: len(answer["again"])],
        "positions_from_prefix_cache": answer["reused"],
        "equal_alone": answer["alone"] == answer["tokens"][: len(answer["alone"])],
        "cache_bytes_per_token": answer["cache_bytes"] / answer["positions"],
        "cache_bytes_per_token_predicted": serving.cache_bytes(form, model),
        "tokens_per_second": round(prompts * tokens / answer["seconds"], 1),
        "attnlab_tokens_per_second": round(prompts * tokens / own_seconds, 1),
        "transformers_tokens_per_second": round(len(other) * tokens / other_seconds, 1),
    }


def _parts(rows: list[int]) -> list[list[int]]:
    return [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]


def _decoded(
    asked: list[list[int]], groups: dict[int, list[int]], decode: Callable[[Tensor], Tensor]
) -> tuple[list[list[int]], float]:
    """The new tokens of each prompt, in batches of prompts of one length, and the seconds."""
    result: list[list[int]] = [[]] * len(asked)
    begin = time.perf_counter()
    for places in groups.values():
        for part in _parts(places):
            new = decode(torch.tensor([asked[place] for place in part])).tolist()
            for place, ids in zip(part, new, strict=True):
                result[place] = ids
    return result, time.perf_counter() - begin


def _scores(
    model: LanguageModel, asked: list[list[int]], own: list[list[int]], groups: dict[int, list[int]], num_ids: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the new tokens, and their margins over the next best, (prompts, new)."""
    scores, margins = torch.zeros(len(own), len(own[0])), torch.zeros(len(own), len(own[0]))
    for places in groups.values():
        for part in _parts(places):
            ids = torch.tensor([asked[place] + own[place] for place in part])
            new = len(own[part[0]])
            logp = model(ids[:, :-1])[:, -new:].float().log_softmax(-1)
            scores[part] = logp.gather(-1, ids[:, -new:, None])[..., 0]
            best = logp[..., :num_ids].topk(2).values
            margins[part] = best[..., 0] - best[..., 1]
    return scores, margins


def _transformers(
    folder: Path, asked: list[list[int]], groups: dict[int, list[int]], tokens: int
) -> tuple[list[list[int]], float]:
    library = hub.transformers()
    code = (folder / "modeling_attnlab.py").is_file()  # which this program has just written
    loaded = library.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=code, dtype="auto").eval()

    def decode(ids: Tensor) -> Tensor:
        mask = torch.ones_like(ids)
        made = loaded.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None)
        return made[:, ids.shape[1] :]

    return _decoded(asked, groups, decode)


def _answer(python: str, question: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        paths = [Path(place) / name for name in ("question.json", "answer.json")]
        paths[0].write_text(json.dumps(question), encoding="utf-8")
        command = [python, str(ENGINE), *map(str, paths)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as engine:
            try:
                printed, _ = waited(f"vLLM decodes {len(question['prompts'])} prompts", engine.communicate)
            finally:
                engine.kill()  # an interrupt leaves no engine behind
        if engine.returncode or not paths[1].is_file():
            errors = [line for line in printed.splitlines() if "Error" in line and "WARNING" not in line]
            raise DataError(f"vLLM did not decode {question['folder']}: {' / '.join(errors[-3:]) or printed[-500:]}")
        answer: dict[str, Any] = json.loads(paths[1].read_text(encoding="utf-8"))
    return answer


def _equal(own: list[list[int]], other: list[list[int]]) -> int:
    return sum(a == b for mine, theirs in zip(own, other, strict=True) for a, b in zip(mine, theirs, strict=True))


def _first(own: list[int], other: list[int]) -> int | None:
    return next((j for j, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), None)


def table(section: dict[str, Any] | None) -> str:
    """The proof in Markdown, for the model card."""
    if section is None:
        return (
            "Proof in an engine: not run. `mode=export format=vllm prove.python=PATH` runs it, with the Python of an "
            "environment with vLLM."
        )
    equal, count = section["tokens_equal"], section["tokens"]
    margin = max((first["margin"] for first in section["first_differences"]), default=0)
    speeds = ("tokens_per_second", "attnlab_tokens_per_second", "transformers_tokens_per_second")
    rows = {
        "engine": ", ".join(section[key] for key in ("engine", "backend", "device", "dtype")),
        "greedy tokens equal to attnlab's": f"{equal:,} of {count:,} ({100 * equal / count:.2f} %)",
        "prompts": section["prompts"],
        "attnlab's tokens that vLLM prefers after the same text": f"{section['tokens_first_after_the_same_text']:,}",
        "largest margin of a first different token": f"{margin:.1e}",
        "largest difference of a log-probability": f"{section['log_probability_difference']:.1e}",
        "equal when asked again, and alone": f"{section['equal_again']}, {section['equal_alone']}",
        "positions read from the prefix cache": section["positions_from_prefix_cache"],
        "cache, bytes per token, measured": f"{section['cache_bytes_per_token']:.1f}",
        "cache, bytes per token, predicted": f"{section['cache_bytes_per_token_predicted']:g}",
        "tokens per second: vLLM, attnlab, transformers": ", ".join(str(section[key]) for key in speeds),
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])
