"""A whole decoder, layer by layer: each is converted on what the converted layers before it compute."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from attnlab.attention import MHA, Attention
from attnlab.config.build import instantiate
from attnlab.conversion.base import Conversion, Layer
from attnlab.conversion.budget import Plan, Survey
from attnlab.conversion.refit import refit, spaced
from attnlab.conversion.settings import Healing
from attnlab.conversion.statistics import Statistics, collect
from attnlab.conversion.texts import Texts
from attnlab.errors import ConfigError, DataError
from attnlab.models.decoder import Decoder, DecoderBlock
from attnlab.run.cache import digest
from attnlab.run.files import write_bytes
from attnlab.run.progress import progress

log = logging.getLogger(__name__)
BATCH = 4  # windows that are chosen together
PIECE = 2  # windows computed at a time: twice as many take twice the memory, and no less time
SURVEYED = 8  # of so many windows one passes through the original first
ATTENDED = 2  # of so many batches one is read with its attention weights
TINY = torch.finfo(torch.float64).tiny
MEASURED = 4  # batches on which the error of a layer's output is measured


@torch.no_grad()
def convert(decoder: Decoder, target: Conversion, tokens: Tensor, folder: Path | None = None) -> list[Layer]:
    """Replace the attention of every layer.

    The texts pass through the model once: a layer's inputs come from the converted layers before it, so that it can
    make up for their errors. The inputs of one layer are held in a file; memory holds the weights, one batch and sums
    of one layer. Where layers share a budget, a part of the texts passes through the original first, and a table of
    errors is kept of each layer.

    Args:
        decoder: in eval mode; it is changed.
        target: what each attention becomes.
        tokens: calibration texts, (windows, positions).
        folder: keeps finished layers, so that an interrupted conversion continues; None: nothing is kept, and the
            layers' inputs are in the system's folder for temporary files.

    Returns:
        The converted layers, with their errors in `about`.

    Raises:
        ConfigError: a layer cannot be converted; nothing is changed if the settings alone tell.
        DataError: the texts give values that are not finite.
        WriteError: the disk is full, for example.
    """
    for attention in decoder.attentions:
        target.refuse(attention)
        assert isinstance(attention, MHA)
        target.planned(attention)
    key = _key(decoder, target, tokens) if folder is not None else ""
    plans = _plans(decoder, target, tokens, folder, key)
    found, last = [], len(decoder.blocks) - 1
    with Texts(decoder, tokens, folder, BATCH, PIECE) as texts, progress("converting layers", last + 1) as advance:
        for number, block in enumerate(decoder.blocks):
            attention = block.attention
            assert isinstance(attention, MHA)
            place = None if folder is None else folder / f"layer-{number:03}.safetensors"
            layer = _stored(place, key)
            new = layer is None
            if layer is None:
                layer = _layer(block, attention, target, texts, plans[number], number)
            block.attention = layer.attention.to(attention.out.weight).train(attention.training)
            measured = OutputError(texts, attention)
            if number < last or new:  # of the last layer, only what is measured
                texts.enter(block, texts.first(MEASURED) if number == last else None, measured if new else None)
            if new:
                layer = replace(layer, about=layer.about | {"output_error": measured.share})
                if place is not None:
                    _store(place, key, layer)
            found.append(layer)
            advance(1)
    return found


def _plans(
    decoder: Decoder, target: Conversion, tokens: Tensor, folder: Path | None, key: str
) -> Sequence[Plan | None]:
    """What each layer gets, from a pass of a part of the texts through the original."""
    attentions = [attention for attention in decoder.attentions if isinstance(attention, MHA)]
    if not target.looks_ahead(attentions[0]):
        return [None] * len(attentions)
    surveys, last = [], len(attentions) - 1
    with (
        Texts(decoder, tokens[::SURVEYED], folder, BATCH, PIECE) as texts,
        progress("surveying layers", last + 1) as advance,
    ):
        for number, (block, attention) in enumerate(zip(decoder.blocks, attentions, strict=True)):
            place = None if folder is None else folder / f"survey-{number:03}.safetensors"
            found = _surveyed(place, key)
            if found is None:
                statistics = _collected(attention, block, texts, number)
                energy = sum(float(texts.hidden[i].double().square().sum()) for i in texts.some())
                weight = 1 / max(energy / statistics.tokens, TINY)
                found = replace(target.survey(attention, statistics), weight=weight)
                if place is not None:
                    write_bytes(place, save(found.tensors(), {"key": key}))
            surveys.append(found)
            if number < last:
                texts.enter(block)
            advance(1)
    return target.plans(attentions, surveys)


def _surveyed(place: Path | None, key: str) -> Survey | None:
    """The survey of a layer that an interrupted conversion has finished; None: there is none."""
    if place is None or not place.is_file():
        return None
    try:
        with safe_open(place, "pt") as file:
            known = (file.metadata() or {}).get("key") == key
        return Survey.of(load_file(place)) if known else None
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        log.warning("%s: damaged (%s); the layer is surveyed again", place, " ".join(str(error).split())[:120])
        return None


def _collected(
    attention: MHA,
    block: DecoderBlock,
    texts: Texts,
    number: int,
    seen: Callable[[int, Tensor], None] | None = None,
) -> Statistics:
    found = collect(attention, texts.inputs(block), texts.some(ATTENDED), seen)
    if not found.moment.isfinite().all() or not found.of_query.isfinite().all():
        raise DataError(
            f"the calibration texts give queries, keys or values that are not finite in layer {number}; check the "
            "model's weights, in float32, and the texts"
        )
    return found


def _layer(
    block: DecoderBlock, attention: MHA, target: Conversion, texts: Texts, plan: Plan | None, number: int
) -> Layer:
    part = texts.some(spaced(texts.positions, attention.out.in_features)) if target.refits else []
    again = {*part, *texts.first(MEASURED)}

    def seen(i: int, heads: Tensor) -> None:
        if i in again:
            texts.originals[i] = heads

    def refitted(i: int, heads: Tensor) -> None:
        texts.outputs[part[i]] = heads

    statistics = _collected(attention, block, texts, number, seen)
    layer = target.convert(attention, statistics, lambda: texts.inputs(block), plan)
    if target.refits:
        inputs = zip(part, texts.inputs(block, part), strict=True)
        pairs = ((x, texts.original(i, x, attention)) for i, x in inputs)
        refit(layer.attention, pairs, refitted)
    return layer


class OutputError:
    """How far the outputs of a converted attention are from the original's, on the first batches.

    Args:
        texts: on their way through the layer.
        original: what it is compared with.
    """

    def __init__(self, texts: Texts, original: Attention) -> None:
        self.texts, self.original = texts, original
        self.lost = self.squares = 0.0
        self.count = 0
        self.sums: Tensor | float = 0.0

    def __call__(self, number: int, x: Tensor, out: Tensor) -> None:
        """Add a piece of a batch.

        Args:
            number: of the piece; those of the first :data:`MEASURED` batches count.
            x: what enters both, (B, T, d).
            out: what the converted one puts out, (B, T, d).
        """
        if number not in self.texts.first(MEASURED):
            return
        want = self.texts.original(number, x, self.original).double().flatten(0, 1)
        self.lost += float((out.double().flatten(0, 1) - want).square().sum())
        self.squares += float(want.square().sum())
        self.sums, self.count = self.sums + want.sum(0), self.count + len(want)

    @property
    def share(self) -> float:
        """Squared error over the original outputs' squared distance from their mean."""
        assert isinstance(self.sums, Tensor)
        return self.lost / (self.squares - float(self.sums.square().sum()) / self.count)


def _key(decoder: Decoder, target: Conversion, tokens: Tensor) -> str:
    """Of what makes converted layers what they are: weights, settings and texts."""
    content = hashlib.sha256()
    for name, value in decoder.state_dict().items():
        content.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        content.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    content.update(tokens.contiguous().numpy().data)
    settings = repr(replace(target, healing=Healing()))  # which does not change what is converted
    return digest([2, content.hexdigest(), type(target).__name__, settings])


def _store(place: Path, key: str, layer: Layer) -> None:
    state = {name: value.contiguous() for name, value in layer.attention.state_dict().items()}
    about = json.dumps({"node": layer.node, "about": layer.about})
    write_bytes(place, save(state, {"key": key, "layer": about}))


def _stored(place: Path | None, key: str) -> Layer | None:
    """A layer that an interrupted conversion has finished; None: there is none, or one of other settings."""
    if place is None or not place.is_file():
        return None
    try:
        with safe_open(place, "pt") as file:
            about = file.metadata() or {}
        if about.get("key") != key:
            return None
        layer = json.loads(about["layer"])
        attention: Attention = instantiate(OmegaConf.create(layer["node"]), path="attention")
        state = load_file(place)
        attention.to(state["out.weight"].dtype).load_state_dict(state)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, ConfigError) as error:
        log.warning("%s: damaged (%s); the layer is converted again", place, " ".join(str(error).split())[:120])
        return None
    log.info("%s: the layer was converted before", place)
    return Layer(layer["node"], attention, layer["about"])
