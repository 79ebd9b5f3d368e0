"""Proof that a serving engine decodes a folder as attnlab does: tokens, log-probabilities, bytes and speed."""

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor

from attnlab.decoding import Sampling
from attnlab.errors import ConfigError, DataError
from attnlab.export import serving
from attnlab.export.weights import README
from attnlab.models import LanguageModel
from attnlab.pretrained import hub
from attnlab.run.console import waited
from attnlab.run.files import write_text
from attnlab.run.markup import cell, plain

CHUNK = 128  # positions that the engine reads in a step: longer prompts are read in chunks, beside others
AGAIN, ALONE = 8, 2  # prompts that are decoded once more, from the prefix cache, and by themselves
BATCH = 64  # rows that attnlab and transformers decode together
ALSO = 16  # prompts that transformers decodes, which expands latents in every step
ENGINE = Path(__file__).with_name("engine.py")
SPACE = 2**30  # bytes of the cache in which requests are timed
IMPORTS = 300  # seconds that imports of the engine may take
Texts = list[list[int]]  # ids of each


class Margin(NamedTuple):
    """The first token of a prompt that differs, and by how much attnlab prefers its own."""

    prompt: int
    token: int
    margin: float


def check(form: serving.Form, longest: int, prove: DictConfig) -> None:
    """ConfigError: this Python cannot import what a form needs, or the model is too short for the requests."""
    path, tokens = prove.python, prove.tokens
    if longest < tokens + 8:
        raise ConfigError(f"prove.tokens={tokens}: the model reads {longest} positions; give fewer tokens")
    if prove.get("requests") and not tokens < prove.length <= longest:
        raise ConfigError(f"prove.length={prove.length}: expected more than prove.tokens={tokens}, up to {longest}")
    imports = "import vllm, attnlab_vllm.config" if form == "plugin" else "import vllm"
    try:
        failed, errors = _run("importing vLLM", [path, "-c", imports], IMPORTS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"prove.python={path}: {error}; expected the Python of an environment with vLLM") from error
    if failed:
        advice = f"; in attnlab's repository: {path} -m pip install --no-deps . plugins/vllm" * ("attnlab" in errors)
        raise ConfigError(f"prove.python={path}: `{imports}` fails there: {errors}{advice}")


@torch.inference_mode()
def prove(
    model: LanguageModel,
    folder: Path,
    form: serving.Form,
    card: Callable[[dict[str, Any]], str],
    num_ids: int,
    end: int,
    python: str,
    prompts: int,
    tokens: int,
    requests: Sequence[int] = (),
    length: int = 2048,
    original: Path | None = None,
) -> dict[str, Any]:
    """Decode sampled prompts in the engine, in attnlab and in transformers -> the section `serving` of a record.

    The prompts are sampled from the model, of four lengths. The engine decodes all of them together, so that batches
    are ragged, in chunks, some of them again from its prefix cache, and some alone. (On a CPU vLLM has no chunks and no
    prefix cache for latents.) It scores the tokens that attnlab has chosen, too.

    Args:
        card: the model card with a section, which replaces the folder's.
        num_ids: ids from here on are never generated.
        end: id before each text.
        python: the Python of the engine's environment.
        tokens: new tokens of each prompt.
        requests: numbers of requests that are timed together, each of `length` tokens, the new ones included.
        original: the folder of the model that was converted, which is timed too.

    Raises:
        DataError: the engine failed.
    """
    room = min(model.longest - tokens - 1, 2 * CHUNK)  # the engine scores a text and adds a token
    sizes = sorted({max(1, room * share // 8) for share in (1, 2, 4, 8)})
    groups = {size: list(range(i, prompts, len(sizes))) for i, size in enumerate(sizes)}
    asked: Texts = [[]] * prompts
    for size, places in groups.items():
        for part in _parts(places):
            begin = torch.full((len(part), 1), end)
            drawn = Sampling(size - 1, seed=size)(model, begin, num_ids=num_ids) if size > 1 else begin[:, :0]
            for place, ids in zip(part, torch.cat((begin, drawn), 1).tolist(), strict=True):
                asked[place] = ids
    greedy = Sampling(tokens, temperature=0)
    own, own_seconds = _decoded(asked, groups, lambda ids: greedy(model, ids, num_ids=num_ids))
    known = num_ids if form == "plugin" else None  # only the plugin's probabilities leave out the other ids
    scores, margins = _scores(model, asked, own, groups, num_ids, known)
    question = _engine(folder, form, model) | {
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
    section = {
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
        "cache_bytes_per_token": answer["cache_bytes_per_token"],
        "cache_bytes_per_token_predicted": serving.cache_bytes(form, model),
        "request_positions": answer["request_positions"],
        "request_cache_bytes": answer["request_bytes"],
        "request_cache_bytes_predicted": serving.request_bytes(
            form, model, answer["request_positions"], answer["block"]
        ),
        "tokens_per_second": round(prompts * tokens / answer["seconds"], 1),
        "attnlab_tokens_per_second": round(prompts * tokens / own_seconds, 1),
        "transformers_tokens_per_second": round(len(other) * tokens / other_seconds, 1),
    }
    if requests:
        load = {"tokens": tokens, "requests": list(requests), "length": length, "ids": num_ids, "cache_bytes": SPACE}
        engines = {"converted" if original else "model": (folder, form)} | (
            {"original": (original, "plain")} if original else {}
        )
        section["load"] = {"length": length, "tokens": tokens, "cache_bytes": SPACE} | {
            name: _answer(python, load | _engine(place, kind, model)) for name, (place, kind) in engines.items()
        }
    write_text(folder / README, card(section))
    return section


def _engine(folder: Path, form: serving.Form, model: LanguageModel) -> dict[str, Any]:
    options, cpu = (serving.options(form, model, cpu=cpu) for cpu in (False, True))
    return {"folder": str(folder), "options": options, "cpu": cpu}


def _parts(rows: list[int]) -> list[list[int]]:
    return [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]


def _decoded(asked: Texts, groups: dict[int, list[int]], decode: Callable[[Tensor], Tensor]) -> tuple[Texts, float]:
    """The new tokens of each prompt, in batches of prompts of one length, and the seconds."""
    result: Texts = [[]] * len(asked)
    begin = time.perf_counter()
    for places in groups.values():
        for part in _parts(places):
            new = decode(torch.tensor([asked[place] for place in part])).tolist()
            for place, ids in zip(part, new, strict=True):
                result[place] = ids
    return result, time.perf_counter() - begin


def _scores(
    model: LanguageModel, asked: Texts, own: Texts, groups: dict[int, list[int]], num_ids: int, known: int | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the new tokens among the `known` ids, and margins over the next best, (prompts, new)."""
    scores, margins = torch.zeros(len(own), len(own[0])), torch.zeros(len(own), len(own[0]))
    for places in groups.values():
        for part in _parts(places):
            ids = torch.tensor([asked[place] + own[place] for place in part])
            new = len(own[part[0]])
            logp = model(ids[:, :-1])[:, -new:, :known].float().log_softmax(-1)
            scores[part] = logp.gather(-1, ids[:, -new:, None])[..., 0]
            best = logp[..., :num_ids].topk(2).values
            margins[part] = best[..., 0] - best[..., 1]
    return scores, margins


def _transformers(folder: Path, asked: Texts, groups: dict[int, list[int]], tokens: int) -> tuple[Texts, float]:
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
        many = f"{len(question['prompts'])} prompts" if "prompts" in question else f"{question['requests']} requests"
        failed, errors = _run(f"vLLM decodes {many}", command)
        if failed or not paths[1].is_file():
            raise DataError(f"vLLM did not decode {question['folder']}: {errors}")
        answer: dict[str, Any] = json.loads(paths[1].read_text(encoding="utf-8"))
    return answer


def _run(what: str, command: list[str], seconds: float | None = None) -> tuple[int, str]:
    """Run a program -> its exit status, and its last errors or output. TimeoutExpired: it took longer."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as engine:
        try:
            printed, _ = waited(what, lambda: engine.communicate(timeout=seconds))
        finally:
            engine.kill()  # an interrupt leaves no engine behind
    errors = [line for line in printed.splitlines() if "Error" in line and "WARNING" not in line]
    return engine.returncode, " / ".join(errors[-3:]) or printed[-500:] or f"it ends with {engine.returncode}"


def _equal(own: Texts, other: Texts) -> int:
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
        f"cache, bytes of a request of {section['request_positions']:,} tokens: measured, predicted": ", ".join(
            f"{section[key]:,.0f}" for key in ("request_cache_bytes", "request_cache_bytes_predicted")
        ),
        "tokens per second: vLLM, attnlab, transformers": ", ".join(str(section[key]) for key in speeds),
        **_load(section.get("load")),
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {cell(plain(value))} |" for key, value in rows.items())])


def _load(load: dict[str, Any] | None) -> dict[str, str]:
    """The rows of timed requests."""
    if load is None:
        return {}
    engines = {name: load[name] for name in ("model", "converted", "original") if name in load}
    names, space = ", ".join(engines), load["cache_bytes"] / 2**20
    rows = {
        f"requests of {load['length']:,} tokens that fit into {space:,.0f} MiB: {names}": [
            e["fit"] for e in engines.values()
        ]
    }
    for same in zip(*(engine["rows"] for engine in engines.values()), strict=True):
        speeds = [f"{one['tokens_per_second']:.1f} ({one['decoding_tokens_per_second']:.1f})" for one in same]
        rows[f"tokens per second, {same[0]['requests']} of these at once (while none reads a prompt): {names}"] = speeds
    return {key: ", ".join(map(str, values)) for key, values in rows.items()}
