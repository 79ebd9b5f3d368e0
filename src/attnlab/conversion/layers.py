"""Conversion of a decoder layer by layer, each on the outputs of the converted layers before it."""

from __future__ import annotations

import copy
import hashlib
import logging
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from attnlab.attention import MHA, Attention
from attnlab.conversion.base import Conversion, Layer, attention_of, within
from attnlab.conversion.budget import LayerPlan, Survey, cheapest
from attnlab.conversion.healing import Healing
from attnlab.conversion.measured import DOUBT, LEAST, PASSES, TOKENS, Choice, Predictions, due, losses
from attnlab.conversion.statistics import Statistics, add_products, collect, symmetric
from attnlab.conversion.texts import Texts
from attnlab.errors import DataError
from attnlab.models.decoder import Decoder, DecoderBlock
from attnlab.run.cache import Damaged, digest, opened, read_index, read_tensors, stored, write_index, write_tensors
from attnlab.run.console import progress
from attnlab.run.files import writing
from attnlab.run.identity import architecture
from attnlab.run.record import first_process

log = logging.getLogger(__name__)
Advance = Callable[[str], None]  # called with what was done in a layer
STORED = "conversions"  # folder in the cache for finished layers, until the run has saved its weights
BATCH = 4  # windows that are chosen together
PIECE = 2  # windows computed at a time: more take more memory, and no less time
SURVEYED = 8  # the first pass through the original reads every 8th window
ATTENDED = 2  # statistics of attention weights read every 2nd batch
HEALED = 0.25  # of the divergence that a smaller size adds is left after healing
TINY = torch.finfo(torch.float64).tiny
MEASURED = 4  # batches on which the error of a layer's output is measured
RIDGE = 1e-3  # of the mean variance of an output projection's inputs, when it is fitted again
POSITIONS, FOR_EACH = 16384, 16  # positions of that regression, and for each input; more change little


def converted_copy(
    cfg: DictConfig, target: Conversion, decoder: Decoder, tokens: Tensor, text: str
) -> tuple[Decoder, list[Layer], dict[str, Any], Path]:
    """Return a converted copy of a decoder, its layers, the record's section `conversion`, and the cache folder.

    The copy shares the weights that no training changes. Finished layers are stored in the cache, so that the same
    command continues an interrupted conversion.

    Args:
        tokens: calibration texts, (windows, positions).
    """
    trained = cfg.mode != "convert" and (target.healing.trained == "all" or cfg.hardware.strategy == "fsdp")
    shared = [attention.parameters() for attention in decoder.attentions] if trained else [decoder.parameters()]
    memo: dict[int, Any] = {id(parameter): parameter for parameters in shared for parameter in parameters}
    copied = copy.deepcopy(decoder, memo).eval()
    healed = cfg.mode != "convert"
    folder = Path(cfg.cache_dir).expanduser() / STORED / _key(copied, architecture(cfg), target, tokens, healed)[:24]
    began = time.perf_counter()
    layers = convert(copied, target, tokens, folder if first_process() else None, healed=healed)
    about = {
        "target": target.name,
        "settings": {key: value for key, value in asdict(target).items() if key not in ("calibration", "healing")},
        "calibration": {"text": text, "tokens": tokens.numel(), "window": tokens.shape[1]},
        "cache": {
            "positions": tokens.shape[1],
            "share": round(_elements(copied, tokens) / _elements(decoder, tokens), 4),
        },
        "seconds": round(time.perf_counter() - began, 2),
        "layers": [layer.about for layer in layers],
    }
    return copied, layers, about, folder


def _elements(decoder: Decoder, tokens: Tensor) -> int:
    """Of the caches of a text as long as those of calibration, windows included."""
    return sum(attention.cache_elements(1, tokens.shape[1]) for attention in decoder.attentions)


@torch.no_grad()
def convert(
    decoder: Decoder, target: Conversion, tokens: Tensor, folder: Path | None = None, *, healed: bool = False
) -> list[Layer]:
    """Replace the attention of every layer in place.

    The texts pass through the model once: a layer's inputs come from the converted layers before it, so that it can
    compensate their errors. If layers share a budget, a part of the texts passes through the original first, for a
    table of errors of each layer.

    Args:
        decoder: in eval mode.
        tokens: calibration texts, (windows, positions).
        folder: for finished layers; None: nothing is stored.
        healed: whether training follows, which restores most of what a small latent loses, and nothing of what a short
            window does not see.

    Returns:
        The converted layers, with their errors in `about`.

    Raises:
        ConfigError: a layer cannot be converted; nothing is changed if the settings are the reason.
        DataError: activations on the texts are not finite.
        WriteError: the disk is full, for example.
    """
    target.planned_layers(decoder.attentions)
    layers, last = [], len(decoder.blocks) - 1
    with TemporaryDirectory() as temporary, _progress(decoder, target, tokens) as advance:
        plans = _plans(decoder, target, tokens, healed, folder, advance)
        texts = Texts(decoder, tokens, BATCH, PIECE, temporary)
        for number, block in enumerate(decoder.blocks):
            attention = block.attention
            assert isinstance(attention, MHA)
            path = None if folder is None else folder / f"layer-{number:03}"
            layer = _read(path)
            new = layer is None
            if layer is None:
                layer = _layer(block, attention, target, texts, plans[number], number)
            else:
                log.info("layer %d was converted before", number)
            block.attention = layer.attention.to(attention.out.weight).train(attention.training)
            errors: list[tuple[float, float, Tensor, int]] = []

            def measure(i: int, x: Tensor, out: Tensor, attention: MHA = attention, errors: Any = errors) -> None:
                if i in texts.first(MEASURED):
                    target = texts.original(i, x, attention).double().flatten(0, 1)
                    lost = float((out.double().flatten(0, 1) - target).square().sum())
                    errors.append((lost, float(target.square().sum()), target.sum(0), len(target)))

            texts.enter(block, texts.first(MEASURED) if number == last else None, measure if new else None)
            if new:
                totals: list[Any] = [sum(values) for values in zip(*errors, strict=True)]
                lost, squares, sums, count = totals
                error = lost / (squares - float(sums.square().sum()) / count)  # over the variance of the outputs
                about, plan = layer.about | {"output_error": error}, plans[number]
                if plan is not None and target.measured:
                    about["divergence"] = plan.divergence
                layer = replace(layer, about=about)
                _write(path, layer)
            layers.append(layer)
            advance("converting layers")
    return layers


@contextmanager
def _progress(decoder: Decoder, target: Conversion, tokens: Tensor) -> Iterator[Advance]:
    """Show how far the whole conversion is, in tokens that pass through layers; call the result after each layer."""
    count, attention = len(decoder.blocks), decoder.blocks[0].attention
    assert isinstance(attention, MHA)
    weights = {"surveying": tokens.numel() // SURVEYED, "converting": tokens.numel()}
    rows = {"surveying": count * target.looks_ahead(attention), "converting": count, "measuring": 0}
    if rows["surveying"] and target.measured:  # a choice passes through half of the layers, on average
        weights["measuring"], rows["measuring"] = max(LEAST, TOKENS // count) * count // 2, PASSES * count
    with progress("converting", sum(weights[what] * rows[what] for what in weights)) as shown:

        def advance(what: str) -> None:
            stage = what.split()[0]
            rows[stage] -= 1
            if stage == "converting":  # what was expected before, and was stored or not necessary
                shown(sum(weights[other] * rows[other] for other in weights if other != stage), what=what)
                rows.update(surveying=0, measuring=0)
            shown(weights[stage], what=what)

        yield advance


def _plans(
    decoder: Decoder, target: Conversion, tokens: Tensor, healed: bool, stored_in: Path | None, advance: Advance
) -> Sequence[LayerPlan | None]:
    """The plan of each layer, from a pass of a part of the texts through the original."""
    attentions = [attention for attention in decoder.attentions if isinstance(attention, MHA)]
    if not target.looks_ahead(attentions[0]):
        return [None] * len(attentions)

    def plans() -> dict[str, Any]:
        if target.measured:
            return {"plans": [p.plain() for p in _measured(decoder, target, tokens, healed, stored_in, advance)]}
        return {"plans": [p.plain() for p in target.plans(attentions, _surveys(decoder, target, tokens, advance))]}

    return [LayerPlan.of(plan) for plan in _once(stored_in, "plans", plans)["plans"]]


def _once(folder: Path | None, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Plain values that are computed, or read if an interrupted conversion has stored them."""
    if folder is None:
        return compute()
    return stored(folder / name, read_index, lambda place: write_index(place, compute()))


def _surveys(decoder: Decoder, target: Conversion, tokens: Tensor, advance: Advance) -> list[Survey]:
    surveys, last = list[Survey](), len(decoder.blocks) - 1
    with TemporaryDirectory() as folder:
        texts = Texts(decoder, tokens[::SURVEYED], BATCH, PIECE, folder)
        for number, block in enumerate(decoder.blocks):
            attention = block.attention
            assert isinstance(attention, MHA)
            statistics = _collected(attention, block, texts, number)
            energy = torch.cat([texts.hidden(i).double().square().sum(-1).flatten() for i in texts.some()]).median()
            surveys.append(replace(target.survey(attention, statistics), weight=1 / max(float(energy), TINY)))
            if number < last:
                texts.enter(block)
            advance("surveying layers")
    return surveys


def _measured(
    decoder: Decoder, target: Conversion, tokens: Tensor, healed: bool, stored_in: Path | None, advance: Advance
) -> list[LayerPlan]:
    """The plan of each layer, by the predictions of the original with each choice for this layer alone."""
    positions, room, layers = tokens.shape[1], 0, list[list[Choice]]()
    predictions = Predictions(decoder, tokens)
    with TemporaryDirectory() as folder:  # inputs and statistics of all layers may be larger than the model
        texts = Texts(decoder, tokens[::SURVEYED], BATCH, PIECE, folder, keep_files=True)
        for number, block in enumerate(decoder.blocks):
            attention, statistics = block.attention, dict[int | None, Statistics]()
            room += attention_of(target.planned_for(attention)).cache_elements(1, positions)
            layers.append([])
            for window in (None, *target.windows(attention, positions)):
                narrow = within(attention, window)
                statistics[window] = _collected(narrow, block, texts, number)
                for plan, node, error in target.choices(narrow, statistics[window]):
                    with torch.device("meta"):  # for its size alone
                        cost = attention_of(node).cache_elements(1, positions)
                    layers[-1].append(Choice(replace(plan, window=window), cost, error))
            outputs = [attention(x) for x in texts.inputs(block)]
            with writing(Path(folder)), Path(folder, str(number)).open("wb") as file:
                pickle.dump((predictions.hidden, statistics, outputs), file)
            texts.enter(block)
            predictions.enter()
            advance("surveying layers")

        def measured(number: int, choice: Choice) -> dict[str, float]:
            block, window = decoder.blocks[number], choice.plan.window
            with Path(folder, str(number)).open("rb") as file:
                predictions.hidden, means, outputs = pickle.load(file)
            texts.number = predictions.block = number
            inputs = partial(texts.inputs, block)
            tried = target.convert(within(block.attention, window), means[window], inputs, choice.plan)
            if target.refit:
                refit(tried.attention, zip(inputs(), outputs, strict=True))
            return {"divergence": predictions.divergence(target.finished(tried).attention)}

        room = max(room, sum(min(choice.cost for choice in layer) for layer in layers))  # sizes may be rounded up
        chosen: list[Choice | None] = [None] * len(layers)
        for made in range(PASSES):  # the best distribution by bounds of what is not measured
            missing = [(i, c) for i, layer in enumerate(layers) for c in due(layer, chosen[i])]
            for number, choice in missing:
                name = f"choice-{number:03}-{choice.plan.name}"
                choice.divergence = _once(stored_in, name, partial(measured, number, choice))["divergence"]
                advance(f"measuring sizes of layers, pass {made + 1} of at most {PASSES}")
            doubt = DOUBT if made < PASSES - 1 else 1.0
            options = [losses(layer, HEALED if healed else 1.0, doubt) for layer in layers]
            chosen = [layer[i] for layer, i in zip(layers, cheapest(options, room), strict=True)]
        plans = [replace(choice.plan, divergence=choice.divergence) for choice in chosen if choice is not None]
        if estimated := sum(plan.divergence is None for plan in plans):
            log.info(
                "the sizes of %d of %d layers are estimated from other sizes that were measured", estimated, len(plans)
            )
        return plans


def _collected(
    attention: MHA,
    block: DecoderBlock,
    texts: Texts,
    number: int,
    seen: Callable[[int, Tensor], None] | None = None,
) -> Statistics:
    statistics = collect(attention, texts.inputs(block), texts.some(ATTENDED), seen)
    if not statistics.moment.isfinite().all() or not statistics.of_query.isfinite().all():
        raise DataError(
            f"the calibration texts give queries, keys or values that are not finite in layer {number}; check the "
            "model's weights, in float32, and the texts"
        )
    return statistics


def _layer(
    block: DecoderBlock, attention: MHA, target: Conversion, texts: Texts, plan: LayerPlan | None, number: int
) -> Layer:
    narrow = within(attention, None if plan is None else plan.window)
    every = max(1, texts.positions // max(POSITIONS, FOR_EACH * attention.out.in_features))
    part = texts.some(every) if target.refit else []
    again = {*part, *texts.first(MEASURED)}

    def seen(i: int, heads: Tensor) -> None:
        if i in again:
            texts.originals[i] = heads

    def refitted(i: int, heads: Tensor) -> None:
        number = part[i]
        if number not in texts.first(MEASURED):  # the original's are not read again: their memory is
            heads = texts.originals.pop(number, heads).copy_(heads)
        texts.outputs[number] = heads

    statistics = _collected(narrow, block, texts, number, seen if narrow is attention else None)
    layer = target.convert(narrow, statistics, lambda: texts.inputs(block), plan)
    if target.refit:
        inputs = zip(part, texts.inputs(block, part), strict=True)
        pairs = ((x, texts.original(i, x, attention)) for i, x in inputs)
        refit(layer.attention, pairs, refitted)
    return target.finished(layer)


@torch.no_grad()
def refit(
    converted: Attention, pairs: Iterable[tuple[Tensor, Tensor]], seen: Callable[[int, Tensor], None] | None = None
) -> None:
    """Fit the output projection to the original's output by a ridge regression, in place.

    With z the heads' outputs of the converted attention, e = original(x) - converted(x), and both around their means:
    W_o += E[e z^T] (E[z z^T] + ridge)^-1, and the bias takes the rest of the mean of e. The heads' errors are
    correlated with their outputs, and partly cancel. Nothing changes if the conversion is exact.

    Args:
        converted: an attention whose projection `out` has a bias.
        pairs: batches of inputs (B, T, d) and the original's outputs (B, T, d).
        seen: called with the number of each batch and the projection's inputs, which the fit does not change.
    """
    out = converted.out
    assert isinstance(out, nn.Linear) and out.bias is not None
    read: list[Tensor] = []
    handle = out.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))
    width, size, count = out.in_features, out.out_features, 0
    gram = torch.zeros(width, width, dtype=torch.float64)
    cross, sums = gram.new_zeros(width, size), (gram.new_zeros(width), gram.new_zeros(size))
    try:
        for number, (x, target) in enumerate(pairs):
            error = (target - converted(x)).flatten(0, -2)
            heads = read.pop()
            if seen is not None:
                seen(number, heads)
            wide = torch.promote_types(heads.dtype, torch.float32)  # of a batch; sums of batches are float64
            z, error = heads.flatten(0, -2).to(wide), error.to(wide)
            add_products(part := z.new_zeros(width, width), z)
            gram, cross, count = gram + part, cross + z.mT @ error, count + len(z)
            sums = sums[0] + z.sum(0), sums[1] + error.sum(0)
    finally:
        handle.remove()
    of_z, of_error = (total / count for total in sums)
    gram, cross = symmetric(gram) / count - torch.outer(of_z, of_z), cross / count - torch.outer(of_z, of_error)
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    added = torch.linalg.solve(gram, cross).mT
    out.weight.add_(added)
    out.bias.add_(of_error - added @ of_z)


# --- finished layers in the cache ---------------------------------------------------------------------------------


def _key(decoder: Decoder, built: dict[str, Any], target: Conversion, tokens: Tensor, healed: bool) -> str:
    """The digest of what converted layers depend on: the model, `built` of its configuration, settings and texts."""
    content = hashlib.sha256()
    for name, value in decoder.state_dict().items():
        content.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        content.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    content.update(tokens.contiguous().numpy().data)
    settings = repr(replace(target, healing=Healing()))  # healing comes after the conversion
    return digest([9, built, content.hexdigest(), type(target).__name__, settings, healed])


def _write(path: Path | None, layer: Layer) -> None:
    if path is not None:
        about = {"node": layer.node, "about": layer.about}
        stored(path, read_tensors, lambda folder: write_tensors(folder, layer.attention.state_dict(), about))


def _read(path: Path | None) -> Layer | None:
    """A finished layer of an interrupted conversion; None if it is missing or damaged."""
    if path is None:
        return None
    try:
        state, about = opened(path, read_tensors)
    except Damaged:
        return None
    attention = attention_of(about["node"])
    attention.to(state["out.weight"].dtype).load_state_dict(state)
    return Layer(about["node"], attention, about["about"])
