"""mode=export: write a trained or a compressed model as a folder that other programs read."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnlab.compression import folder
from attnlab.errors import ConfigError, printable
from attnlab.export import proof, serving
from attnlab.export.card import card
from attnlab.export.weights import README, in_dtype
from attnlab.pretrained import decoder, huggingface
from attnlab.run import record as records
from attnlab.run.directory import EXPORTED, foreign, is_run, locked
from attnlab.run.files import write_text
from attnlab.run.markup import literal
from attnlab.tasks.base import Trains, task_of

log = logging.getLogger(__name__)

EVERY_TASK = True  # a task need not list this mode in `task.modes`
KEEPS = False  # no run directory, unless hydra.run.dir= names one
USAGE = """from transformers import {names}

model = {kind}.from_pretrained({{folder}})
{words}"""
WORDS = "tokenizer = AutoTokenizer.from_pretrained({folder})"


def run(cfg: DictConfig, record: dict[str, Any], directory: Path | None) -> None:
    """Write the model of `checkpoint=`, a trained run, or of `model=`, a compressed language model.

    The folder is `exported/` in that run, where it replaces an earlier one, or `output=`.

    `format=hf` writes what transformers or timm loads without attnlab: a plain Llama where it can hold the model, else
    a folder with modelling files; for images a folder of timm. `format=vllm` writes what vLLM decodes, and with
    `prove.python=` decodes it there and compares. `format=safetensors` writes plain weights, a config of plain values,
    and the files of the run directory that belong to them. Each has a model card.

    Raises:
        ConfigError: the run has no model to export, or none in this format, or the folder has other files.
        DataError: files of the run are missing or damaged.
        LockedError: a process writes in the run.
        WriteError: the folder cannot be written.
    """
    compressed = cfg.checkpoint is None or cfg.task.modes[0] == "compress"  # such a task trains nothing
    source = _compressed_folder(cfg) if compressed else Path(cfg.checkpoint).expanduser()
    if bits := OmegaConf.select(cfg, "cache.bits"):
        log.warning("cache.bits=%d is left out: an exported model caches in its own dtype", bits)
    with _destination(cfg, source) as place:
        if compressed:
            folders = [source.parent, source]
            prove = _export_compressed(source, place, cfg)
        else:
            about = {
                "task": cfg.task.name,
                "attention": records.mechanism_of(cfg.choices),
                "compress": cfg.choices.compress,
            }
            folders = [source] if source.is_dir() else [source.parent, source.parent.parent]
            prove = task_of(cfg, Trains).export(place, cfg.format or "hf", _record_of(folders, about))
        run = next((folder for folder in folders if cfg.output is None and records.recorded(folder)), None)
        known = {} if run is None else dict(records.recorded(run))
        if run is not None and known.pop("serving", None) is not None:  # of the folder that is replaced
            records.write(known, run)
        if prove is not None:
            record["serving"] = prove()
            if run is not None:
                records.write(known | {"serving": record["serving"]}, run)
    record["exported"] = str(place)
    print(printable(str(place)))


@contextmanager
def _destination(cfg: DictConfig, source: Path) -> Iterator[Path]:
    """The folder to write: `output=`, or `exported/` of the run of `source`, which is locked."""
    if cfg.output is not None:
        place = Path(cfg.output).expanduser().absolute()
        if not cfg.output or place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise ConfigError(f"output={cfg.output}: expected a new or an empty folder for the exported model")
        yield place
        return
    source = source.absolute()
    run = next((folder for folder in (source, *source.parents[:2]) if is_run(folder)), None)
    if run is None:
        raise ConfigError(f"mode=export: {source} is not in the directory of a run; give output=<a new folder>")
    with locked(run):
        if names := [name for name in foreign(run) if name.startswith(f"{EXPORTED}/")]:
            raise ConfigError(f"{run / names[0]}: no run has written it, and an export replaces the folder; move it")
        yield run / EXPORTED


def _compressed_folder(cfg: DictConfig) -> Path:
    """The folder of the compressed language model that `checkpoint=` or `model=` names."""
    key = "model" if cfg.checkpoint is None else "checkpoint"
    path = cfg[key]
    source = folder.find(path) if path else None
    if source is None:
        setting = f"{key}={path}" if path else f"{key}= is not given"
        raise ConfigError(f"mode=export: {setting}; give a run of mode=compress, or its folder {folder.COMPRESSED}")
    if cfg.format not in (None, "hf", "vllm", "deepseek"):
        raise ConfigError(f"format={cfg.format}: {source} is a compressed language model; expected hf or vllm")
    return source


def _export_compressed(source: Path, place: Path, cfg: DictConfig) -> Callable[[], dict[str, Any]] | None:
    """A compressed language model as a plain Hugging Face checkpoint, its factors multiplied out -> a proof or None."""
    words = str(source) if (source / "tokenizer_config.json").is_file() else None
    model: Any = in_dtype(folder.densified(source), cfg)
    served = decoder.of(model, str(source)) if cfg.format in ("vllm", "deepseek") else None
    if served is not None and cfg.prove.python:
        proof.check("plain", served.longest, cfg.prove)
    huggingface.export(model, place, words)
    if words is None:
        log.warning("%s has no tokenizer; the checkpoint has none", source)
    kind = json.loads((place / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    about = _record_of([source.parent, source], {"task": "compressed language model"})
    names, tokenizer = (f"AutoTokenizer, {kind}", WORDS) if words else (kind, "")
    python = USAGE.format(kind=kind, names=names, words=tokenizer).strip().format(folder=literal(place.name))
    notes = ["The factors are multiplied out: this model is as large as a dense one, and `parameters` those it had."]
    title = f"{about['task']}, {about.get('compress', kind)}"

    def text_of(section: dict[str, Any] | None) -> str:
        serve = None if served is None else serving.section("plain", place.name, served, proof.table(section))
        usage = ", or its name on a hub."
        return card(about, title=title, python=python, folder=place.name, usage=usage, library="transformers",
                    notes=notes, serve=serve)  # fmt: skip

    write_text(place / README, text_of(None))
    if served is None:
        return None
    log.info("serve it: vllm serve %s", serving.command(str(place), serving.options("plain", served, cpu=False)))
    sizes = model.config.vocab_size, model.config.bos_token_id or 0
    return partial(proof.prove, served, place, "plain", text_of, *sizes, **cfg.prove) if cfg.prove.python else None


def _record_of(folders: Sequence[Path], otherwise: dict[str, Any]) -> Mapping[str, Any]:
    """The record in the first folder that has one; what it lacks is `otherwise`."""
    record = next((record for folder in folders if (record := records.recorded(folder))), {})
    if not record:
        log.warning("%s: no record that can be read; the model card's numbers are not run", folders[0])
    return otherwise | records.upgraded(record)
