"""A pretrained decoder in a language-modelling run: its weights, its conversion, and what each state of it scores."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from attnlab.attention import MHA, Attention
from attnlab.config.batch import counted
from attnlab.config.build import instantiate
from attnlab.config.model import SAMPLE
from attnlab.config.nodes import check_nodes
from attnlab.conversion import Conversion, Healing, Layer
from attnlab.conversion.layers import convert
from attnlab.data.text.corpora import Split
from attnlab.errors import ConfigError, DataError
from attnlab.models.build import without_memory
from attnlab.models.decoder import Decoder
from attnlab.run.cache import digest
from attnlab.run.files import write_text
from attnlab.run.record import first_process

if TYPE_CHECKING:
    from attnlab.data.text.language_modelling import LanguageModellingData

log = logging.getLogger(__name__)

CONVERSION = "conversion.json"  # in the run directory: what builds the attention of each layer, and the record's part
STORED = "conversions"  # in the cache: finished layers of conversions, until what comes after them is saved
HELD_OUT: tuple[Split, ...] = ("validation", "test")
LONGEST = 32  # characters of a token, of which so many are read
SAMPLED, SHARED = 200, 0.05  # lines of a held-out split that are looked for; the share of lines that may be the same
LARGEST = 16  # times the parameters of the attention before it that a converted one may have; a tenth is usual
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
        nodes: what builds them, of each layer.
    """
    for block, node in zip(decoder.blocks, nodes, strict=True):
        block.attention = attention_of(node)
    return decoder


def restored(decoder: Decoder, path: Path) -> Decoder:
    """Put the mechanisms that a run has converted, with random weights, in the place of each layer's.

    Args:
        decoder: it is changed.
        path: the file that `write_nodes` has written.

    Raises:
        DataError: the file is damaged, or of another model.
    """
    nodes, attentions = read_nodes(path), decoder.attentions
    if len(nodes) != len(attentions):
        raise DataError(
            f"{path}: has {counted(len(nodes), 'layer')}, and the model {len(attentions)}: the file is of another run"
        )
    for number, (node, own) in enumerate(zip(nodes, attentions, strict=True)):
        if node.get("d_model") != own.d_model:
            raise DataError(
                f"{path}: layer {number}: attention.d_model={node.get('d_model')}: the model is {own.d_model} wide"
            )
    try:
        with without_memory():
            sizes = [sum(p.numel() for p in attention_of(node).parameters()) for node in nodes]
        for number, (size, own) in enumerate(zip(sizes, attentions, strict=True)):
            if size > LARGEST * sum(p.numel() for p in own.parameters()):
                raise DataError(f"{path}: layer {number}: {size} parameters: the file is damaged, or of another run")
        return reshape(decoder, nodes)
    except ConfigError as error:
        raise DataError(f"{path}: {error}") from error


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


def layers_of(weights: Path) -> Path:
    """The file of a run that tells the layers of its converted model.

    Args:
        weights: the file of weights, or the folder of checkpoints.

    Raises:
        DataError: there is no such file.
    """
    places = [folder / CONVERSION for folder in (weights.parent, weights.parent.parent)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(
            f"{places[weights.is_file()]}: no such file; expected the layers of the converted model, which a run "
            "writes once it has converted its model: copy the whole run directory, or start the run's command again"
        )
    return found


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
    except (OSError, ValueError, LookupError, TypeError, AssertionError, RecursionError) as error:
        why = " ".join(str(error).split())[:100] or "no list of nodes"
        raise DataError(f"{path}: not the layers of a converted model ({why}); copy the run directory again") from error
    for number, node in enumerate(found):
        kind = str(node["_target_"])
        if not kind.startswith("attnlab.attention."):
            raise DataError(f"{path}: {kind} is no mechanism of attnlab")
        if "${" in json.dumps(node) or "_partial_" in node:
            raise DataError(f"{path}: layer {number}: has a reference or _partial_; expected plain values")
        try:
            check_nodes({"attention": node})
        except ConfigError as error:
            raise DataError(f"{path}: layer {number}: {error}") from error
    return found


def write_nodes(
    path: Path, nodes: Sequence[Mapping[str, Any]], about: Mapping[str, Any] | None = None, stored: Path | None = None
) -> None:
    """Write what builds the attention of each layer.

    Args:
        path: the file.
        nodes: of each layer.
        about: the record's section `conversion`, which a run that is interrupted and continued needs again.
        stored: the folder with the finished layers.
    """
    content = {"layers": list(nodes), "about": about, "stored": stored and stored.name}
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_about(path: Path) -> dict[str, Any] | None:
    """The record's section `conversion`, up to the training; None: the file has none.

    Args:
        path: the file, which `read_nodes` has read.
    """
    found = json.loads(path.read_text(encoding="utf-8")).get("about")
    return found if isinstance(found, dict) else None


def remove_stored(path: Path, cache_dir: Path) -> None:
    """Remove the finished layers of a conversion, whose run has saved its weights.

    Args:
        path: the file that `write_nodes` has written.
        cache_dir: the cache with the layers.
    """
    name = json.loads(path.read_text(encoding="utf-8")).get("stored")
    if isinstance(name, str) and re.fullmatch("[0-9a-f]+", name):
        shutil.rmtree(cache_dir / STORED / name, ignore_errors=True)  # another run may be removing it too


def check_inputs(cfg: DictConfig, positions: int) -> None:
    """Refuse what the weights' files or the settings of a calibration tell before any text is read.

    Args:
        cfg: the run's configuration, with `task.weights`.
        positions: the longest text that the model takes.

    Raises:
        ConfigError: calibration windows that do not fit.
        DataError: no such model or calibration text, or files that are missing or cut off.
    """
    from attnlab.pretrained import hub

    target = target_of(cfg)
    if target is not None:
        settings = target.calibration
        if settings.window > positions:
            raise ConfigError(
                f"convert.calibration.window={settings.window}: the model has {positions} positions; give no more"
            )
        if settings.tokens < settings.window:
            raise ConfigError(
                f"convert.calibration.tokens={settings.tokens} is less than a text of "
                f"convert.calibration.window={settings.window} tokens"
            )
        if settings.file is not None and not Path(settings.file).expanduser().is_file():
            raise DataError(f"convert.calibration.file={settings.file}: no such file; expected a text file")
    if cfg.task.weights != SAMPLE:
        hub.folder(str(cfg.task.weights))


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
        source = str(sample_model(data.source, data.root, data.cache_dir, cfg.seed, cfg.task.sample_facts))
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
    settings, vocabulary = target.calibration, data.vocabulary
    if settings.file is None:
        ids = data.beginning("train", settings.tokens).tolist()
        where, name = "the training split", f"the training split of {data.source.name}"
    else:
        path = Path(settings.file).expanduser()
        where, name = f"convert.calibration.file={path}", path.name
        _refuse_files(path, where, data)
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(LONGEST * settings.tokens)
        except (OSError, ValueError) as error:
            raise DataError(f"{where}: cannot be read as UTF-8 text ({error})") from error
        ids = vocabulary.ids(text)[: settings.tokens]
    windows = len(ids) // settings.window
    if not windows:
        raise DataError(
            f"{where}: the calibration text has {len(ids)} tokens, less than one text of "
            f"convert.calibration.window={settings.window}"
        )
    _refuse_scored(vocabulary.text(ids), where, data)
    name = f"the first {len(ids)} tokens of {name}"
    return torch.tensor(ids[: windows * settings.window]).view(windows, settings.window), name


def scale_tokens(data: LanguageModellingData) -> Tensor:
    """The first texts of the training split, on which the layers of a teacher are measured, (windows, positions).

    Args:
        data: the corpus, ready.
    """
    ids = torch.from_numpy(data.beginning("train", 16 * data.window))
    size = min(data.window, len(ids))
    return ids[: len(ids) // size * size].view(-1, size)


def _refuse_files(path: Path, where: str, data: LanguageModellingData) -> None:
    assert data.root is not None
    for split in HELD_OUT:
        for file in data.source.files(data.root, split):
            if file.exists() and file.samefile(path) and file not in data.source.files(data.root, "train"):
                raise DataError(f"{where}: that is the {split} split, which is scored")


def _refuse_scored(text: str, where: str, data: LanguageModellingData) -> None:
    """Refuse a text with more than a few lines of a held-out split, wherever its lines break.

    Args:
        text: what a conversion reads.
        where: it is from, for the error.
        data: the corpus, ready.
    """
    whole, own = " ".join(text.split()), set(_lines(text))
    for split in HELD_OUT:
        held = list(dict.fromkeys(_lines(data.text(split))))
        some = held[:: max(1, len(held) // SAMPLED)]
        found, shared = sum(line in whole for line in some), len(own.intersection(held))
        if found > SHARED * len(some) or shared > SHARED * len(own):
            raise DataError(
                f"{where}: it has text of the {split} split, which is scored ({found} of {len(some)} lines of that "
                f"split, {shared} of its own {len(own)} lines); give another convert.calibration.file"
            )


def _lines(text: str) -> list[str]:
    """The lines that are too long to be the same by chance, with single spaces."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if len(line) > 80]


def converted(
    cfg: DictConfig, decoder: Decoder, tokens: Tensor, text: str
) -> tuple[Decoder, list[Layer], dict[str, Any], Path]:
    """A converted copy of a decoder, its layers, the record's section `conversion`, and where the layers are stored.

    The copy shares the decoder's weights where no training changes them.
    Finished layers are stored in the cache, so that the same command continues an interrupted conversion.

    Args:
        cfg: the run's configuration.
        decoder: with the pretrained weights.
        tokens: calibration texts, (windows, positions).
        text: which they are, for the record.
    """
    target = target_of(cfg)
    assert target is not None
    trained = cfg.mode != "convert" and (target.healing.trained == "all" or cfg.hardware.strategy == "fsdp")
    shared = [attention.parameters() for attention in decoder.attentions] if trained else [decoder.parameters()]
    memo: dict[int, Any] = {id(parameter): parameter for parameters in shared for parameter in parameters}
    copied = copy.deepcopy(decoder, memo).eval()  # weights that no training changes are held once
    texts = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    what = [target.name, repr(replace(target, healing=Healing())), str(cfg.task.weights), cfg.seed, texts]
    folder = Path(cfg.cache_dir).expanduser() / STORED / digest(what)[:24]
    began = time.perf_counter()
    layers = convert(copied, target, tokens, folder if first_process() else None)
    about = {
        "target": target.name,
        "settings": {key: value for key, value in asdict(target).items() if key not in ("calibration", "healing")},
        "calibration": {"text": text, "tokens": tokens.numel(), "window": tokens.shape[1]},
        "seconds": round(time.perf_counter() - began, 2),
        "layers": [layer.about for layer in layers],
        "points": dict.fromkeys(POINTS, "not run"),
    }
    return copied, layers, about, folder
