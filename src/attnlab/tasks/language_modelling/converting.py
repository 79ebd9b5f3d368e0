"""A pretrained decoder in a language-modelling run: its weights, its conversion, and what each state of it scores."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from attnlab.attention import MHA, Attention
from attnlab.config.build import instantiate
from attnlab.config.model import SAMPLE
from attnlab.conversion import Conversion, Layer
from attnlab.conversion.layers import convert
from attnlab.data.text.corpora import Split
from attnlab.errors import ConfigError, DataError
from attnlab.models.decoder import Decoder
from attnlab.runs.files import write_text
from attnlab.runs.record import first_process

if TYPE_CHECKING:
    from attnlab.data.text.language_modelling import LanguageModellingData

log = logging.getLogger(__name__)

CONVERSION = "conversion.json"  # in the run directory: what builds the attention of each layer
HELD_OUT: tuple[Split, ...] = ("validation", "test")
POINTS = ("original", "converted", "healed")


def point(found: Mapping[str, Any]) -> dict[str, Any]:
    """Perplexity, cache and speed of one state of the model, and its needle in a haystack if that was asked for.

    Args:
        found: the sections `quality`, `kv_cache` and `inference` of a record.
    """
    cache = {
        f"cache_{name}": found["kv_cache"][name] for name in ("bytes_per_token", "bytes_measured", "bytes_predicted")
    }
    speed = found["inference"]["tokens_per_second"]
    needle = {"needle": found["quality"]["needle"]} if "needle" in found["quality"] else {}
    return {"perplexity": found["quality"]["perplexity"], **cache, "tokens_per_second": speed, **needle}


def target_of(cfg: DictConfig) -> Conversion | None:
    """The conversion of a run; None: its model keeps its attention.

    Args:
        cfg: the run's configuration.
    """
    if cfg.choices.get("convert") in (None, "none"):
        return None
    found: Conversion = instantiate(cfg.convert, path="convert")
    return found


def attention_of(node: Mapping[str, Any]) -> Attention:
    """The mechanism of a node of plain values, with random weights.

    Args:
        node: `_target_` and arguments.
    """
    found: Attention = instantiate(OmegaConf.create(dict(node)), path="attention")
    return found


def reshape(decoder: Decoder, nodes: Sequence[Mapping[str, Any]]) -> Decoder:
    """Put mechanisms with random weights in the place of each layer's.

    Args:
        decoder: it is changed.
        nodes: what builds them.

    Raises:
        DataError: there are not as many as layers.
    """
    if len(nodes) != len(decoder.blocks):
        raise DataError(f"{CONVERSION} has {len(nodes)} layers, the model {len(decoder.blocks)}: of another run")
    for block, node in zip(decoder.blocks, nodes, strict=True):
        block.attention = attention_of(node)
    return decoder


def outline(decoder: Decoder, target: Conversion) -> Decoder:
    """A decoder with the mechanisms that a conversion will give it, as far as the settings tell.

    Args:
        decoder: the original, which may be on meta; it is changed.
        target: the conversion.

    Raises:
        ConfigError: an attention cannot be converted, or its cache would not shrink.
    """
    planned = []
    for attention in decoder.attentions:
        target.refuse(attention)
        assert isinstance(attention, MHA)
        planned.append(target.planned(attention))
    return reshape(decoder, planned)


def read_nodes(path: Path) -> list[dict[str, Any]]:
    """What `write_nodes` has written.

    Args:
        path: the file.

    Raises:
        DataError: it is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["layers"]
        assert isinstance(found, list) and all(isinstance(node, dict) and "_target_" in node for node in found)
    except (OSError, ValueError, LookupError, TypeError, AssertionError) as error:
        raise DataError(
            f"{path}: not the layers of a converted model ({' '.join(str(error).split())[:100]})"
        ) from error
    for node in found:
        kind = str(node["_target_"])
        if not kind.startswith("attnlab.attention."):
            raise DataError(f"{path}: {kind} is no mechanism of attnlab")
    return found


def write_nodes(path: Path, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Write what builds the attention of each layer.

    Args:
        path: the file.
        nodes: of each layer.
    """
    write_text(path, json.dumps({"layers": list(nodes)}, indent=1) + "\n")


def load_original(cfg: DictConfig, decoder: Decoder, data: LanguageModellingData | None) -> Decoder:
    """Fill a decoder with the pretrained weights that the run begins with.

    Args:
        cfg: the run's configuration.
        decoder: of the model's sizes.
        data: the corpus, on which the sample model is trained; None: of the run's cache.

    Raises:
        DataError: the weights cannot be read.
    """
    from attnlab.pretrained import huggingface
    from attnlab.pretrained.decoder import fill
    from attnlab.tasks.language_modelling.sample import sample_model

    source = str(cfg.task.weights)
    if source == SAMPLE:
        if data is None or data.root is None:
            raise ConfigError("the sample model is trained on the task's text, which is not read here")
        source = str(sample_model(data.source, data.root, data.cache_dir, cfg.seed))
    fill(decoder, huggingface.load(source, dtype=torch.float32))
    return decoder


def calibration_tokens(target: Conversion, data: LanguageModellingData) -> tuple[Tensor, str]:
    """The texts on which a conversion is calibrated, (windows, positions), and which they are.

    Args:
        target: with the settings.
        data: the corpus, ready.

    Raises:
        DataError: the text is shorter than one window, or it is the one that is scored.
    """
    settings = target.calibration
    if settings.file is None:
        file = data.tokens("train")
        ids = torch.from_numpy(file.read(0, min(settings.tokens, len(file))))
        name = f"the first {len(ids)} tokens of the training split of {data.source.name}"
    else:
        path = Path(settings.file).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise DataError(f"convert.calibration.file={path}: cannot be read ({error})") from error
        _refuse_scored(path, text, data)
        ids = torch.tensor(data.vocabulary.ids(text)[: settings.tokens])
        name = f"the first {len(ids)} tokens of {path.name}"
    windows = len(ids) // settings.window
    if not windows:
        raise DataError(
            f"the calibration text has {len(ids)} tokens, less than convert.calibration.window={settings.window}"
        )
    return ids[: windows * settings.window].view(windows, settings.window).long(), name


def _refuse_scored(path: Path, text: str, data: LanguageModellingData) -> None:
    """Refuse a file that is, or has, the held-out text."""
    assert data.root is not None
    for split in HELD_OUT:
        for file in data.source.files(data.root, split):
            if file.is_file() and file.samefile(path):
                raise DataError(f"convert.calibration.file={path}: that is the {split} split, which is scored")
        lines = [line for one in data.source.texts(data.root, split) for line in one.splitlines() if len(line) > 80]
        if lines and sum(line in text for line in lines[:50]) > len(lines[:50]) // 2:
            raise DataError(f"convert.calibration.file={path}: it has the text of the {split} split, which is scored")


def converted(
    cfg: DictConfig, decoder: Decoder, data: LanguageModellingData, directory: Path
) -> tuple[Decoder, list[Layer], dict[str, Any]]:
    """A converted copy of a decoder, its layers, and the record's section `conversion`.

    Args:
        cfg: the run's configuration.
        decoder: with the pretrained weights.
        data: the corpus, ready.
        directory: the run's; finished layers are kept there until all are.
    """
    target = target_of(cfg)
    assert target is not None
    tokens, text = calibration_tokens(target, data)
    limit = decoder.max_length
    if tokens.shape[1] > limit:
        raise ConfigError(f"convert.calibration.window={tokens.shape[1]}: the model has {limit} positions")
    copied = copy.deepcopy(decoder).eval()
    folder = directory / "conversion" if first_process() else None
    began = time.perf_counter()
    layers = convert(copied, target, tokens, folder)
    about = {
        "target": target.name,
        "settings": {key: value for key, value in asdict(target).items() if key not in ("calibration", "healing")},
        "calibration": {"text": text, "tokens": tokens.numel(), "window": tokens.shape[1]},
        "seconds": round(time.perf_counter() - began, 2),
        "layers": [layer.about for layer in layers],
        "points": dict.fromkeys(POINTS, "not run"),
    }
    if folder is not None and folder.is_dir():
        shutil.rmtree(folder)  # the finished layers of a conversion that is whole now
    return copied, layers, about
