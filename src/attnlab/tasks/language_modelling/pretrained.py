"""A pretrained decoder as the model of a language-modelling task: its sizes in the configuration, then its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from attnlab.config.batch import check_tokens
from attnlab.config.model import SAMPLE, check_model, pretrained_decoder


def configured(cfg: DictConfig, given: Sequence[str]) -> DictConfig:
    """The configuration of a run with a pretrained decoder: that of its model in place of the task's own.

    Any other configuration is returned as it is.

    Args:
        cfg: composed, with Hydra's node; it is not changed.
        given: the keys and groups of the command line.

    Raises:
        ConfigError: the model has something that cannot be carried over, or what is given does not fit it.
        DataError: there is no such model, or its config cannot be read.
    """
    named = pretrained_decoder(cfg, given)
    if named is cfg:
        return cfg
    cfg, source = named, named.task.weights
    if source != SAMPLE:
        check_model(source, str(cfg.task.model._target_))
    model, layers, options = nodes(source)
    with open_dict(cfg):
        cfg.task.model = model
        cfg.task.data.vocab_size = options["vocab_size"]
        cfg.task.data.vocabulary = {"_target_": "attnlab.data.PretrainedTokens", "source": source}
        cfg.attention, name = attention_node(layers)
        cfg.hydra.runtime.choices.attention = name
        window = cfg.task.data.window
        if "task.data.window" not in given and window > model["max_length"]:
            cfg.task.data.window = model["max_length"]
    tokens, window = OmegaConf.select(cfg, "convert.healing.tokens"), cfg.task.data.window
    if "task.train.batch.tokens" not in given and isinstance(tokens, int) and isinstance(window, int) and window > 0:
        check_tokens("convert.healing.tokens", tokens, window)
    return cfg


def nodes(source: str) -> tuple[dict[str, Any], list[dict[str, Any]], Mapping[str, Any]]:
    """The nodes `task.model` and, of each layer, `attention`, and the model's own config.

    Args:
        source: a local folder, a name of the hub, or SAMPLE.

    Raises:
        ConfigError, DataError: as :func:`attnlab.pretrained.decoder.nodes_of` and
            :func:`attnlab.pretrained.huggingface.config_of`.
    """
    from attnlab.pretrained import decoder, huggingface

    options = decoder.SAMPLE if source == SAMPLE else huggingface.config_of(source)
    return *decoder.nodes_of(options, source), options


def attention_node(layers: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The node `attention` for a list of layers, and the name of the choice: one mechanism, or a hybrid stack.

    Args:
        layers: the node of each layer.
    """
    distinct = [node for i, node in enumerate(layers) if node not in layers[:i]]
    if len(distinct) == 1:
        return distinct[0], _name(distinct[0])
    names: dict[str, dict[str, Any]] = {}
    pattern = []
    for node in layers:
        name = next((name for name, known in names.items() if known == node), None)
        if name is None:
            base = _name(node)
            name = base if base not in names else f"{base}_{len(names)}"
            names[name] = node
        pattern.append(name)
    return {"pattern": pattern, "mechanisms": names}, "hybrid"


def _name(node: Mapping[str, Any]) -> str:
    kind = str(node["_target_"]).rpartition(".")[2]
    if kind == "SlidingWindow":
        return "sliding_window"
    heads, groups = node["num_heads"], node["num_kv_heads"]
    return "mha" if groups == heads else "mqa" if groups == 1 else "gqa"
