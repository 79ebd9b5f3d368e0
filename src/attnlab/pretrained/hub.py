"""Folders of Hugging Face models, local ones before those of the hub; read without running their code."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before transformers)

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from attnlab.errors import ConfigError, DataError
from attnlab.pretrained.weights import check_stored, check_values, first_line

log = logging.getLogger(__name__)

CONFIG = "config.json"
TEXT = ["*.json", "*.txt", "*.model", "*.jinja"]  # configs and tokenizers
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the second is read with weights_only
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
    """The folder of a model: `source` itself, or its copy in the hub's cache, downloaded if missing.

    Args:
        weights: False: the config and the tokenizer are sufficient.

    Raises:
        DataError: an unknown folder or name, missing files, or no answer of the hub within seconds.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        _complete(path, source, weights)
        return path
    if path.exists():
        raise DataError(f"model={source}: a file; give its folder, with {CONFIG}, tokenizer files and *.safetensors")
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
        raise DataError(
            f"model={source}: {path / CONFIG} is missing; expected {CONFIG} and *.safetensors (a run: checkpoint=)"
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
    for kind in WEIGHTS:
        single, index = path / kind, path / f"{kind}.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            try:
                parts = [path / part for part in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
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
    """A model with the weights of a folder, in eval mode on the CPU.

    Args:
        config: of that class; not read again from the folder, where it may name code.
        dtype: of the parameters; None: as stored.

    Raises:
        DataError: damaged or missing weights, other shapes, or values that are not finite.
    """
    files = weight_files(path, source)
    messages = transformers().utils.logging
    verbosity = messages.get_verbosity()
    messages.set_verbosity_error()  # missing keys are refused below
    try:
        model, about = kind.from_pretrained(
            path, config=config, dtype=dtype or "auto", local_files_only=True, output_loading_info=True,
            trust_remote_code=False, ignore_mismatched_sizes=True,
            use_safetensors=files[0].suffix == ".safetensors",  # else weights_only
        )  # fmt: skip
    except Exception as error:  # of safetensors, pickle, torch or transformers
        raise DataError(f"model={source}: the weights in {path} cannot be read: {first_line(error)}") from error
    finally:
        messages.set_verbosity(verbosity)
    for name, shape, wanted in about["mismatched_keys"]:
        raise DataError(
            f"model={source}: {name} has shape {tuple(shape)} in the weights, and {tuple(wanted)} by {path / CONFIG}"
        )
    if missing := sorted(about["missing_keys"]):
        raise DataError(f"model={source}: the weights in {path} lack {missing[0]}; they are of another architecture")
    for file in files:
        check_stored(file, model)
    for name, parameter in model.named_parameters():
        check_values(path, name, parameter, parameter.dtype)
    module: nn.Module = model.eval()
    return module
