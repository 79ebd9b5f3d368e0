"""mode=generate checkpoint=... prompt=...: continue a text with a trained language model, through its cache."""

import logging
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from attnlab.errors import ConfigError, printable
from attnlab.run.device import autocast, record_compiled
from attnlab.tasks.base import task_of
from attnlab.tasks.language_modelling.task import LanguageModellingTask

log = logging.getLogger(__name__)
KEEPS = False  # no run directory, unless hydra.run.dir= names one


def run(cfg: DictConfig, record: dict[str, Any], directory: Path | None) -> None:
    """Print the prompt and its continuation, and save them in the record as `generation`.

    Raises:
        ConfigError: the prompt and its continuation are longer than the model's context.
    """
    task = task_of(cfg, LanguageModellingTask)
    module = task.restore()
    task.sizes(record, module.model)
    record_compiled(cfg, module.compiled_steps_part, record["environment"])
    vocabulary = module.vocabulary
    predictor = task.predictor(module)
    ids = vocabulary.begun(vocabulary.given(cfg.prompt or ""))
    if wrong := predictor.too_long(ids):
        raise ConfigError(f"prompt of {wrong}")
    compiler, began = module.compiled.seconds(), time.perf_counter()
    with autocast(module.device, predictor.dtype):
        tokens = predictor.continued(ids)
    seconds = time.perf_counter() - began - (module.compiled.seconds() - compiler)
    text = vocabulary.continuation(tokens, ids)
    record["corpus"] = "none: a prompt"
    record["generation"] = {"prompt": cfg.prompt or "", "text": text, "tokens": len(tokens)}
    if vocabulary.stops and len(tokens) == cfg.task.sampling.tokens and tokens[-1] not in vocabulary.stops:
        log.info("the text is cut after task.sampling.tokens=%d tokens", len(tokens))
        record["generation"]["cut"] = True
    if left_out := vocabulary.warn_left_out():
        record["generation"]["left_out"] = left_out
    record["inference"] |= {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(len(tokens) / seconds, 1),
        "batch": 1,
        "beam": 1,
        "dtype": str(predictor.dtype or torch.float32).removeprefix("torch."),
        "protocol": f"a prompt of {len(ids)} {vocabulary.unit}s read at once, then {len(tokens)} steps",
    }
    between = " " if cfg.prompt and vocabulary.unit == "word" else ""
    print(printable(f"{cfg.prompt or ''}{between}{text}", keep="\n\t"))
