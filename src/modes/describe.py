"""mode=describe: parameters, cache and arithmetic from the config alone."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from .build import build_model, count_parameters, without_memory


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    """Builds the model without memory and fills `parameters`, `kv_cache` and `multiply_adds_per_token`.

    Cache bytes and multiply-adds are those of one decoding batch of `bench` shape: batch x beam hypotheses of `text`
    tokens after a prompt of `prompt` positions (the encoder's output).
    """
    data = cfg.task.data
    with without_memory():
        model = build_model(cfg, data.vocab_size, data.ctc_vocab_size)
    attentions = model.decoder.attentions
    shape = cfg.bench
    text = shape.text[0] if not isinstance(shape.text, int) else shape.text
    dtype = getattr(torch, shape.dtype)
    elements = sum(a.cache_elements(shape.batch * shape.beam, text, shape.prompt, shape.batch) for a in attentions)
    record["parameters"] = count_parameters(model)
    record["kv_cache"] |= {
        "elements_per_token_per_layer": attentions[0].cache_elements_per_token,
        "bytes_per_token": attentions[0].cache_elements_per_token * len(attentions) * dtype.itemsize,
        "bytes_predicted": elements * dtype.itemsize,
        "shape": {"batch": shape.batch, "beam": shape.beam, "prompt": shape.prompt, "text": text, "dtype": shape.dtype},
    }
    record["multiply_adds_per_token"] = {
        "attention": sum(a.multiply_adds(shape.prompt + text) for a in attentions),
        "decoder": model.decoder.multiply_adds(shape.prompt + text),
        "context": shape.prompt + text,
    }
