"""Folders of Hugging Face models, local ones before those of the hub; read without running their code."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before transformers)

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from attnlab.config.rules import GGUF
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained import adapter, gguf
from attnlab.pretrained.weights import FLOATING, check_values, first_line, tensors

log = logging.getLogger(__name__)

CONFIG = "config.json"
TEXT = ["*.json", "*.txt", "*.model", "*.jinja"]  # configs and tokenizers
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the second is read with weights_only
MASKS = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$")  # constants that older versions stored, as buffers
SECONDS = 5.0  # timeout of the hub


def transformers() -> Any:
    """The library. ConfigError: it is not installed."""
    try:
        import transformers as library
    except ImportError as error:
        raise ConfigError("transformers is not installed: pip install 'attnlab[hf]'") from error
    if not sys.stderr.isatty():
        library.utils.logging.disable_progress_bar()  # it would fill a log file
    return library


def folder(source: str, *, weights: bool = True) -> Path:
    """The folder of a model: `source`, that of a GGUF file, or its copy in the hub's cache, downloaded if missing.

    Args:
        weights: False: the config and the tokenizer are sufficient.

    Raises:
        DataError: an unknown folder or name, missing or damaged files, or no answer of the hub within seconds.
        ConfigError: a GGUF file that is not supported, or gguf is not installed.
    """
    path = Path(source).expanduser()
    if gguf.is_file(path):
        return gguf.folder(path, source, transformers())
    if path.is_dir():
        _complete(path, source, weights)
        return path
    if path.exists():
        parts = f"{CONFIG}, tokenizer files and *.safetensors"
        raise DataError(f"model={source}: a file; give its folder, with {parts}, or a {GGUF} file")
    return _cached(source, weights) or _downloaded(source, weights)


def _cached(name: str, weights: bool) -> Path | None:
    """The copy in the hub's cache, without a network; None if it is missing or incomplete."""
    from huggingface_hub import errors, snapshot_download

    try:
        path = Path(snapshot_download(name, local_files_only=True))
        _complete(path, name, weights)
    except errors.HFValidationError as error:
        raise DataError(f"model={name}: no such folder, and no name of the hub; give a Hugging Face model's") from error
    except (FileNotFoundError, DataError):
        return None
    return path


def file(name: str, source: str) -> Path:
    """The file of weights of a model of the hub, from its cache or downloaded.

    DataError: an unknown model, one without weights, or no answer of the hub within seconds.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    for file in WEIGHTS:
        if isinstance(path := try_to_load_from_cache(name, file), str):
            return Path(path)
    files = _files(name, source, "download it on a machine with a network, and give the file")
    if not (wanted := [file for file in WEIGHTS if file in files]):
        raise DataError(f"model={source}: {name} on the hub has none of {', '.join(WEIGHTS)}")
    try:
        return Path(hf_hub_download(name, wanted[0], etag_timeout=SECONDS))
    except Exception as error:  # of httpx, the hub or the file system
        raise DataError(f"model={source}: the download failed ({first_line(error)}); run it again") from error


def _files(name: str, source: str, advice: str) -> list[str]:
    """The files of a model of the hub, in one attempt within seconds: a download would retry for over a minute.

    DataError: the hub cannot be reached, or refuses; with the advice.
    """
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        raise DataError(f"model={source}: no such path, not in the hub's cache, and HF_HUB_OFFLINE is set; {advice}")
    try:
        about = HfApi().model_info(name, timeout=SECONDS)
    except errors.GatedRepoError as error:
        raise DataError(f"model={source}: accept its licence on huggingface.co and log in (hf auth login)") from error
    except errors.RepositoryNotFoundError as error:
        raise DataError(f"model={source}: neither a local path nor a model of the hub that you may read") from error
    except Exception as error:  # of httpx, the hub or sockets
        reason = first_line(error)
        raise DataError(f"model={source}: no such path, and the hub cannot be reached ({reason}); {advice}") from error
    return [file.rfilename for file in about.siblings or []]


@contextmanager
def offline_if_unreachable() -> Iterator[bool]:
    """Set the hub's libraries offline if the hub cannot be reached, and yield whether they are.

    Otherwise they would try five times for each file, for more than a minute.
    """
    import datasets  # type: ignore[import-untyped]
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=SECONDS)
        except Exception as error:  # of httpx or sockets
            log.info("the hub cannot be reached (%s): only its cache is used", first_line(error))
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield bool(constants.HF_HUB_OFFLINE)
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _downloaded(name: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    advice = f"download it on a machine with a network (hf download {name} --local-dir FOLDER) and give model=FOLDER"
    files = _files(name, name, advice)
    patterns = list(TEXT)
    if weights:
        safe = any(re.fullmatch(r"model[^/]*\.safetensors", file) for file in files)
        patterns.append("model*.safetensors" if safe else "pytorch_model*.bin")
    try:
        path = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns="*/*", etag_timeout=SECONDS))
    except Exception as error:
        raise DataError(
            f"model={name}: the download failed ({first_line(error)}); run it again, or {advice}"
        ) from error
    _complete(path, name, weights)
    return path


def _complete(path: Path, source: str, weights: bool) -> None:
    """DataError: the folder lacks its config, or weights if they are needed."""
    if not (path / CONFIG).is_file():
        if files := sorted(path.glob(f"*{GGUF}")):
            raise DataError(f"model={source}: {CONFIG} is missing; give one of its GGUF files: model={files[0]}")
        base = f"; {adapter.CONFIG} is of an adapter: copy the files of the model that it names into this folder"
        raise DataError(
            f"model={source}: {path / CONFIG} is missing; expected {CONFIG} and *.safetensors (a run: checkpoint=)"
            f"{base * (path / adapter.CONFIG).is_file()}"
        )
    for file in weight_files(path, source) if weights else ():
        if file.suffix != ".safetensors":
            continue
        try:  # reads the header, and compares the size
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"model={source}: {file} is damaged or not complete ({first_line(error)}); copy or download it again"
            ) from error


def weight_files(path: Path, source: str) -> list[Path]:
    """The files of weights that transformers reads from a folder, in its order of preference.

    DataError: no weights, a damaged index of parts, or a missing part.
    """
    if file := gguf.weights_of(path):
        return [file]
    for kind in WEIGHTS:
        single, index = path / kind, path / f"{kind}.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
                parts = [path / Path(name).name for name in names]  # not outside the folder
            except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
                raise DataError(f"{index}: not an index of weights ({first_line(error)})") from error
            if missing := next((part for part in parts if not part.is_file()), None):
                raise DataError(f"model={source}: {missing} is missing; {index.name} names it")
            return parts
    raise DataError(f"model={source}: no weights in {path}; expected model.safetensors or pytorch_model.bin")


def read_config(path: Path, source: str) -> dict[str, Any]:
    """The content of config.json. DataError: not an object, or the weights are quantised."""
    file = path / CONFIG
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({first_line(error)})") from error
    if not isinstance(config, dict):
        raise DataError(f"{file}: expected an object, got {type(config).__name__}")
    if quantised := config.get("quantization_config") or config.get("compression_config"):
        kind = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise DataError(
            f"model={source}: its weights are quantised ({kind}); give the original model in float32, float16 or "
            "bfloat16"
        )
    return config


def read_model(kind: type[Any], config: Any, path: Path, source: str, *, dtype: torch.dtype | None) -> nn.Module:
    """A model with all weights of a folder, its LoRA adapter merged, in eval mode on the CPU.

    Args:
        config: of that class; not read again from the folder, where it may name code.
        dtype: of the parameters; None: as stored.

    Raises:
        DataError: damaged, missing or unused weights, other shapes, values that are not finite, or two files with
            other values of one parameter.
        ConfigError: an adapter, and peft is not installed.
    """
    files = weight_files(path, source)
    reader = gguf.opened(files[0], source) if files[0].suffix == GGUF else None
    options: dict[str, Any] = {"dtype": dtype or "auto"}
    if reader is not None:
        options = {"dtype": dtype or torch.float32, "gguf_file": str(files[0])}
    untied = bool(getattr(config, "tie_word_embeddings", False)) and is_untied(kind, path, source)
    with _warnings(source):  # keys that are missing or not used are refused below
        try:
            with gguf.without_bar() if reader is not None else nullcontext():
                model, about = kind.from_pretrained(
                    path, config=config, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True,
                    use_safetensors=files[0].suffix == ".safetensors", trust_remote_code=False,  # else weights_only
                    adapter_kwargs={"subfolder": files[0].name}, **options,  # not there: it is merged below
                )  # fmt: skip
        except Exception as error:  # of safetensors, pickle, torch or transformers
            raise DataError(f"model={source}: the weights in {path} cannot be read: {first_line(error)}") from error
        _check_keys(about, config, path, source)
        if reader is None:
            _check_files(model, path, files)
        else:
            gguf.complete(model, reader, source)
        if untied:
            _untie(model)
        model = adapter.merged(model, path, source)
    for name, parameter in model.named_parameters():
        check_values(path if reader is None else files[0], name, parameter, parameter.dtype)
    module: nn.Module = model.eval()
    return module


@contextmanager
def _warnings(source: str) -> Iterator[None]:
    """Log each warning of transformers as one line, if all goes well; an error says what is wrong itself."""
    logger, handler = logging.getLogger("transformers"), BufferingHandler(1000)
    handler.setLevel(logging.WARNING)
    before, logger.handlers = logger.handlers, [handler]
    try:
        yield
    finally:
        logger.handlers = before
    for record in handler.buffer:
        log.warning("model=%s: transformers: %s", source, " ".join(record.getMessage().split()))


def _check_keys(about: Mapping[str, Any], config: Any, path: Path, source: str) -> None:
    """DataError: a tensor of another shape, one that is missing, or one that has no place in the model."""
    for name, shape, wanted in about["mismatched_keys"]:
        sizes = {*wanted} - {*shape}
        keys = ", ".join(key for key, value in config.to_dict().items() if type(value) is int and value in sizes)
        raise DataError(
            f"model={source}: {name} has shape {tuple(shape)} in the weights, and {tuple(wanted)} by {path / CONFIG}"
            f"{f' ({keys})' * bool(keys)}"
        )
    if missing := sorted(about["missing_keys"]):
        raise DataError(f"model={source}: the weights in {path} lack {missing[0]}; they are of another architecture")
    if unused := sorted(name for name in about["unexpected_keys"] if not MASKS.search(name)):
        raise DataError(
            f"model={source}: the model of {path / CONFIG} has no place for {unused[0]} of its weights "
            f"({len(unused)} tensors); correct {CONFIG}, or give the model that they belong to"
        )


def _check_files(model: Any, path: Path, files: list[Path]) -> None:
    """Compare every tensor of a folder with the model: of two with one name, a library takes either.

    DataError: a file has other values or other tensors than the model, or a parameter is not floating point in it.
    """
    state, ignored = model.state_dict(), [MASKS.pattern, r"inv_freq$", r"position_ids$"]
    ignored += model._keys_to_ignore_on_load_unexpected or []
    prefix = f"{model.base_model_prefix}."  # names in a file may have it or not
    copies = {file for kind in ("model*.safetensors", "pytorch_model*.bin") for file in path.glob(kind)} - {*files}
    read: dict[str, Tensor] = {}
    for file in (*files, *sorted(copies)):
        try:
            weights = tensors(file)
        except DataError as error:
            if file in files:
                raise
            log.warning("not used: %s", error)
            continue
        for name, value in weights.items():
            own = next((own for own in (name, prefix + name, name.removeprefix(prefix)) if own in state), None)
            used = read.get(name) if own is None else state[own]
            if own and state[own].is_floating_point() and value.dtype not in FLOATING:
                raise DataError(f"{file}: {name} is not floating point: quantised or damaged; give the original")
            if used is None and file in copies and not any(re.search(pattern, name) for pattern in ignored):
                raise DataError(f"{file}: {name} is not in {files[0].name}, which is read instead; remove one of them")
            if used is not None and not _same(value, used):
                raise DataError(f"{file}: {name} differs from the one that is read; remove one of the two")
            read.setdefault(name, value)
    if others := sorted({*path.glob("*.safetensors")} - {*files, *copies} - {*adapter.files(path)}):
        log.warning("%s: not used, as transformers does not read it either", ", ".join(map(str, others)))


def _untie(model: Any) -> None:
    """Let the config say that weights are not tied, as transformers does not; no two names share one then."""
    model.config.tie_word_embeddings = False
    for name, other in type(model)._tied_weights_keys.items():
        parameter = model.get_parameter(name)
        if parameter is model.get_parameter(other):  # the bias of a head whose weight is not tied
            place, _, key = name.rpartition(".")
            setattr(model.get_submodule(place), key, nn.Parameter(parameter.detach().clone()))


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, or one is the other in a narrower dtype. NaN equals NaN."""
    if one.shape != other.shape:
        return False
    one, other = (x.nan_to_num() if x.is_floating_point() else x for x in (one, other))
    return torch.equal(one.to(other.dtype), other) or torch.equal(one, other.to(one.dtype))


def is_untied(kind: type[Any], path: Path, source: str) -> bool:
    """Whether a folder has other weights under the two names of one that `kind` ties, such as head and embedding.

    transformers then uses both, whatever tie_word_embeddings says. False without weights.

    DataError: a file is damaged, or the two have other shapes.
    """
    try:
        files = weight_files(path, source)
    except DataError:  # not downloaded yet
        return False
    if files[0].suffix == GGUF:  # it has a head or none, and its config says which
        return False
    stored = {name: value for file in files for name, value in tensors(file).items()}
    prefix = f"{kind.base_model_prefix}."
    for pair in (kind._tied_weights_keys or {}).items():
        # GPT-NeoX's head has another name in files
        names = [(name, name.removeprefix(prefix), name.replace("lm_head", "embed_out")) for name in pair]
        first, second = (next((stored[name] for name in each if name in stored), None) for each in names)
        if first is None or second is None:
            continue
        if first.shape != second.shape:
            raise DataError(
                f"model={source}: {pair[0]} has shape {tuple(first.shape)}, {pair[1]} {tuple(second.shape)}"
            )
        if not torch.equal(first.double(), second.double()):
            return True
    return False
