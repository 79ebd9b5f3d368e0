"""A whole decoder, layer by layer: each is converted on what the converted layers before it compute."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
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
from attnlab.errors import DataError
from attnlab.models.decoder import Decoder, DecoderBlock
from attnlab.runs.cache import digest
from attnlab.runs.files import write_bytes
from attnlab.runs.progress import progress

log = logging.getLogger(__name__)
BATCH = 4  # windows at a time
SURVEYED = 8  # of so many windows one passes through the original first
ATTENDED = 2  # of so many batches one is read with its attention weights
TINY = torch.finfo(torch.float64).tiny
MEASURED = 4  # batches on which the error of a layer's output is measured


@torch.no_grad()
def convert(decoder: Decoder, target: Conversion, tokens: Tensor, folder: Path | None = None) -> list[Layer]:
    """Replace the attention of every layer.

    The texts pass through the model once: a layer's inputs come from the converted layers before it, so that it can
    make up for their errors. Besides the weights, the inputs of one layer are held, and sums of one layer. Where layers
    share a budget, a part of the texts passes through the original first, and a table of errors is kept of each layer.

    Args:
        decoder: in eval mode; it is changed.
        target: what each attention becomes.
        tokens: calibration texts, (windows, positions).
        folder: keeps finished layers, so that an interrupted conversion continues; None: nothing is kept.

    Returns:
        The converted layers, with their errors in `about`.

    Raises:
        ConfigError: a layer cannot be converted; nothing is changed if the settings alone tell.
        DataError: the texts give values that are not finite.
    """
    originals = decoder.attentions
    for attention in originals:
        target.refuse(attention)
        assert isinstance(attention, MHA)
        target.planned(attention)
    key = _key(decoder, target, tokens) if folder is not None else ""
    plans = _plans(decoder, target, tokens, folder, key)
    hidden = [decoder.embed(rows, 0) for rows in tokens.split(BATCH)]
    found = []
    with progress("converting layers", len(originals)) as advance:
        for number, block in enumerate(decoder.blocks):
            attention = block.attention
            assert isinstance(attention, MHA)
            place = None if folder is None else folder / f"layer-{number:03}.safetensors"
            layer = _stored(place, key)
            new = layer is None
            if layer is None:
                layer = _layer(block, attention, target, hidden, plans[number], number)
            block.attention = layer.attention.to(attention.out.weight).train(attention.training)
            measured = OutputError(attention, block.attention)
            for i, x in enumerate(hidden):  # of the last layer, only what is measured
                if number + 1 < len(originals) or i < MEASURED:
                    hidden[i] = block(x, measured if new and i < MEASURED else block.attention)
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
    hidden = [decoder.embed(rows, 0) for rows in tokens[::SURVEYED].split(BATCH)]
    surveys = []
    with progress("surveying layers", len(attentions)) as advance:
        for number, (block, attention) in enumerate(zip(decoder.blocks, attentions, strict=True)):
            place = None if folder is None else folder / f"survey-{number:03}.safetensors"
            found = _surveyed(place, key)
            if found is None:
                statistics = _collected(attention, map(block.attention_norm, hidden), number)
                energy = sum(float(x.double().square().sum()) for x in hidden) / statistics.tokens
                found = replace(target.survey(attention, statistics), weight=1 / max(energy, TINY))
                if place is not None:
                    write_bytes(place, save(found.tensors(), {"key": key}))
            surveys.append(found)
            for i, x in enumerate(hidden if number + 1 < len(attentions) else ()):
                hidden[i] = block(x, attention)
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


def _collected(attention: MHA, inputs: Iterable[Tensor], number: int) -> Statistics:
    found = collect(attention, inputs, ATTENDED)
    if not found.moment.isfinite().all() or not found.of_query.isfinite().all():
        raise DataError(
            f"the calibration texts give queries, keys or values that are not finite in layer {number}; check the "
            "model's weights, in float32, and the texts"
        )
    return found


def _layer(
    block: DecoderBlock, attention: MHA, target: Conversion, hidden: list[Tensor], plan: Plan | None, number: int
) -> Layer:
    def inputs() -> Iterable[Tensor]:
        return map(block.attention_norm, hidden)

    layer = target.convert(attention, _collected(attention, inputs(), number), inputs, plan)
    if target.refits:
        part = hidden[:: spaced(sum(x.shape[0] * x.shape[1] for x in hidden), attention.out.in_features)]
        refit(layer.attention, attention, lambda: map(block.attention_norm, part))
    return layer


class OutputError:
    """A converted attention, (B, T, d) -> (B, T, d), that measures how far its outputs are from the original's.

    Args:
        original: what it is compared with.
        converted: what is computed.
    """

    def __init__(self, original: Attention, converted: Attention) -> None:
        self.original, self.converted = original, converted
        self.lost = self.squares = 0.0
        self.count = 0
        self.sums: Tensor | float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        out, want = self.converted(x), self.original(x).double().flatten(0, 1)
        self.lost += float((out.double().flatten(0, 1) - want).square().sum())
        self.squares += float(want.square().sum())
        self.sums, self.count = self.sums + want.sum(0), self.count + len(want)
        return out

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
        content.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    content.update(tokens.contiguous().numpy().tobytes())
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
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        log.warning("%s: damaged (%s); the layer is converted again", place, " ".join(str(error).split())[:120])
        return None
    log.info("%s: the layer was converted before", place)
    return Layer(layer["node"], attention, layer["about"])
