"""mode=generate checkpoint=... prompt=...: continue a text with a trained language model, through its cache."""

import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from attnlab.config.build import instantiate
from attnlab.decoding import Sampling
from attnlab.errors import ConfigError, printable
from attnlab.run.device import autocast, record_compiled, scoring_dtype
from attnlab.tasks.base import task_of
from attnlab.tasks.language_modelling.task import LanguageModellingTask

KEEPS = False  # no run directory, unless hydra.run.dir= names one


def run(cfg: DictConfig, record: dict[str, Any], directory: Path | None) -> None:
    """Print the prompt and its continuation, and save them in the record as `generation`.

    Raises:
        ConfigError: the prompt and its continuation are longer than the model's context.
    """
    task = task_of(cfg, LanguageModellingTask)
    sampling: Sampling = instantiate(cfg.task.sampling, path="task.sampling")
    module = task.restore()
    task.sizes(record, module.model)
    record_compiled(cfg, module.compiled_steps_part, record["environment"])
    vocabulary, device = module.vocabulary, module.device
    ids = [vocabulary.end, *vocabulary.ids(cfg.prompt or "")]
    longest = module.model.longest
    if len(ids) + sampling.tokens > longest:
        raise ConfigError(
            f"prompt of {len(ids)} {vocabulary.unit}s and task.sampling.tokens={sampling.tokens} make "
            f"{len(ids) + sampling.tokens} positions, more than the model's context of {longest}; shorten the "
            "prompt or lower task.sampling.tokens"
        )
    low = scoring_dtype(cfg.hardware.precision)
    compiler, began = module.compiled_seconds(), time.perf_counter()
    with autocast(device, low):
        tokens = sampling(
            module.model,
            torch.tensor([ids], device=device),
            num_ids=vocabulary.num_ids,
            dtype=low,
            compiled=module.compiled_steps,
        )
    seconds = time.perf_counter() - began - (module.compiled_seconds() - compiler)
    text = vocabulary.text(tokens[0].tolist())
    record["corpus"] = "none: a prompt"
    record["generation"] = {"prompt": cfg.prompt or "", "text": text, "tokens": tokens.shape[1]}
    record["inference"] |= {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens.shape[1] / seconds, 1),
        "batch": 1,
        "beam": 1,
        "dtype": str(low or torch.float32).removeprefix("torch."),
        "protocol": f"a prompt of {len(ids)} {vocabulary.unit}s read at once, then {tokens.shape[1]} steps",
    }
    between = " " if cfg.prompt and vocabulary.unit == "word" else ""
    print(printable(f"{cfg.prompt or ''}{between}{text}", keep="\n\t"))
