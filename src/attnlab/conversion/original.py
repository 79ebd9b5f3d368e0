"""The pretrained decoder of a run: its sizes in the configuration, then its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from attnlab.config.batch import check_tokens
from attnlab.config.rules import SAMPLE
from attnlab.errors import ConfigError, DataError
from attnlab.models.decoder import Decoder

if TYPE_CHECKING:
    from attnlab.conversion.base import Conversion
    from attnlab.data.text.language_modelling import LanguageModellingData


def completed(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Replace the task's model and attention in a configuration by those of the pretrained decoder.

    Raises:
        ConfigError: a part of the model is not supported, or an override does not fit it.
        DataError: the model is missing, or its config cannot be read.
    """
    from attnlab.pretrained import decoder, huggingface

    source = cfg.task.weights
    options = decoder.SAMPLE if source == SAMPLE else huggingface.config_of(source)
    model, layers = decoder.nodes_of(options, source)
    if layers[0]["qk_norm"] and OmegaConf.select(cfg, "convert.norm") == "rms":
        raise ConfigError(f"convert.norm=rms: {source} has norms of queries and keys, as DeepSeek has not")
    with open_dict(cfg):
        cfg.task.model = model
        cfg.task.data.vocab_size = options["vocab_size"]
        cfg.task.data.vocabulary = {"_target_": "attnlab.data.PretrainedTokens", "source": source}
        if source != SAMPLE:  # whose width is a multiple of the heads of the sample's recipe
            cfg.task.attention_heads, cfg.task.attention_head_dim = layers[0]["num_heads"], layers[0]["head_dim"]
        cfg.attention, name = attention_node(layers)
        cfg.hydra.runtime.choices.attention = name
        cut = []
        for key in ("task.data.window", "task.data.eval_window", "convert.calibration.window"):
            if key not in overrides and (OmegaConf.select(cfg, key) or 0) > model["max_length"]:
                OmegaConf.update(cfg, key, model["max_length"])
                cut.append(key)
        _check_update(cfg, overrides, "task.data.window" in cut)
    return cfg


def _check_update(cfg: DictConfig, overrides: Sequence[str], cut: bool) -> None:
    """Refuse an update of healing that is not a multiple of the window.

    Args:
        cut: the model's positions decide the window; then a number of tokens that the user did not give follows it.
    """
    key, of_training = "convert.healing.tokens", "task.train.batch.tokens"
    tokens, window = OmegaConf.select(cfg, key), cfg.task.data.window
    valid = isinstance(tokens, int) and isinstance(window, int) and window > 0
    if not valid or of_training in overrides or cfg.mode not in ("train", "describe"):
        return
    if cut and key not in overrides:
        for name in (key, of_training):
            OmegaConf.update(cfg, name, max(1, tokens // window) * window)
    else:
        check_tokens(key, tokens, window)


def attention_node(layers: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The node `attention` of all layers, and its name: one mechanism, or a hybrid stack."""
    distinct = [node for i, node in enumerate(layers) if node not in layers[:i]]
    if len(distinct) == 1:
        return distinct[0], _name(distinct[0])
    names: dict[str, dict[str, Any]] = {}
    for node in distinct:
        base = _name(node)
        names[base if base not in names else f"{base}_{len(names)}"] = node
    pattern = [next(name for name, known in names.items() if known == node) for node in layers]
    return {"pattern": pattern, "mechanisms": names}, "hybrid"


def _name(node: Mapping[str, Any]) -> str:
    if str(node["_target_"]).endswith(".SlidingWindow"):
        return "sliding_window"
    heads, groups = node["num_heads"], node["num_kv_heads"]
    return "mha" if groups == heads else "mqa" if groups == 1 else "gqa"


def check_inputs(cfg: DictConfig, target: Conversion | None, positions: int) -> None:
    """Check the files of the weights and the settings of the calibration before any text is read.

    Raises:
        ConfigError: calibration windows longer than the model's or the calibration's text.
        DataError: a missing model or calibration text, or damaged files.
    """
    from attnlab.pretrained import hub

    if target is not None:
        settings = target.calibration
        if settings.window > positions:
            raise ConfigError(
                f"convert.calibration.window={settings.window}: expected at most the model's {positions} positions"
            )
        if settings.tokens < settings.window:
            raise ConfigError(
                f"convert.calibration.tokens={settings.tokens}: expected at least one text of "
                f"convert.calibration.window={settings.window} tokens"
            )
        if settings.file is not None and not Path(settings.file).expanduser().is_file():
            raise DataError(f"convert.calibration.file={settings.file}: no such file; expected a text file")
    if cfg.task.weights != SAMPLE:
        hub.folder(str(cfg.task.weights))


def load_original(cfg: DictConfig, decoder: Decoder, data: LanguageModellingData | None) -> Decoder:
    """Load the run's pretrained weights into a decoder. DataError: they cannot be read.

    Args:
        data: the corpus, for training the sample model; None: the run's data is not loaded.
    """
    from attnlab.conversion.sample import sample_model
    from attnlab.pretrained import huggingface
    from attnlab.pretrained.decoder import fill
    from attnlab.run.device import device_of

    source = str(cfg.task.weights)
    if source == SAMPLE:
        if data is None or data.root is None:
            raise ConfigError("the sample model is trained on the task's text, which this mode does not read")
        device = device_of(cfg).type
        facts, keys = cfg.task.sample_facts, cfg.task.sample_keys
        source = str(sample_model(data.source, data.root, data.cache_dir, cfg.seed, facts, device, keys))
    fill(decoder, huggingface.load(source, dtype=torch.float32))
    return decoder
