"""GGUF files of llama.cpp, read by transformers, which dequantises their weights. A file is data: nothing in it is run.

A folder of the cache has the config, the tokenizer and the generation config of a file, and names the file. It is used
as any model's folder.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

from attnlab.config.rules import GGUF
from attnlab.errors import AttnlabError, ConfigError, DataError
from attnlab.run.cache import digest, read_index, stored_files, write_index

log = logging.getLogger(__name__)

VERSION = 1  # to be raised when the same file gives another folder
ARCHITECTURES = ("gpt2", "llama", "phi3", "qwen2", "qwen3")  # Mistral's files have that of Llama
SIZES = {"context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count"}
EPSILONS = {"attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"}
OPTIONAL = (
    "vocab_size attention.head_count_kv attention.key_length attention.value_length rope.dimension_count "
    "rope.freq_base rope.scaling.type rope.scaling.factor rope.scaling.original_context_length rope.scaling.finetuned"
)
KEYS = SIZES | EPSILONS | {*OPTIONAL.split()}  # of an architecture, which are read
FACTORS = "rope_freqs.weight"  # the divisor of each rotary frequency, in files of Llama 3.1 and later
ENDS = ("eos", "eot", "eom")  # tokens that end a text or a turn
LIKE_GPT2 = ("default", "gpt-2", "gpt2", "mpt", "olmo", "phi-2")  # values of tokenizer.ggml.pre: words as in GPT-2
DIGITS = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")  # and each digit a word
BEGUN = ("llama3", "llama-v3", "llama-bpe", "falcon3")  # a text begins with BOS unless the file says otherwise


def is_file(path: Path) -> bool:
    """Whether a path is that of a GGUF file. DataError: it ends in .gguf, and there is no such file."""
    if path.suffix != GGUF or path.is_dir():
        return False
    if not path.is_file():
        raise DataError(f"model={path}: no such GGUF file")
    return True


def folder(path: Path, source: str, library: Any) -> Path:
    """The folder of the cache with the config, the tokenizer and the generation config of a file, made if missing.

    Args:
        library: transformers.

    Raises:
        DataError: the file is damaged or not complete, or it is no language model.
        ConfigError: gguf is not installed, or an architecture, a quantisation or a value is not supported.
    """
    path, state = path.resolve(), path.stat()
    key = [VERSION, library.__version__, str(path), state.st_size, state.st_mtime_ns]
    place = _cache() / f"{path.stem[:40]}-{digest(key)[:16]}"
    return stored_files(place, lambda partial: _write(partial, path, source, library))


def weights_of(place: Path) -> Path | None:
    """The GGUF file of a folder that :func:`folder` has made; None: another folder."""
    return Path(read_index(place)["file"]) if place.parent == _cache() else None


def about(place: Path) -> dict[str, Any]:
    """What a record says of the file of a folder: its tensors by type, and what was not read. {}: another folder."""
    return {} if weights_of(place) is None else dict(read_index(place)["about"])


def opened(path: Path, source: str) -> Any:
    """The header of a file, which is all there. DataError: it is damaged, not complete, or a part of several."""
    try:
        import numpy as np
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(f"model={source}: a GGUF file is read with gguf: pip install 'attnlab[gguf]'") from error

    class Bounded(GGUFReader):
        """A reader that fails at the end of the file, where the library's would go on with empty values."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("the file ends before its last tensor")
            return super()._get(offset, dtype, count, override_order)

    with _reading(source):
        reader = Bounded(path)
        if reader.byte_order != "I":
            raise DataError(f"model={source}: the file has the byte order of another machine; convert it with gguf")
        if (parts := _value(reader, "split.count", 1)) > 1:
            raise DataError(f"model={source}: one of {parts} parts of a model; join them with llama-gguf-split --merge")
        if (kind := _value(reader, "general.type", "model")) != "model":
            raise DataError(f"model={source}: the file has a {kind}, not a model")
        return reader


def complete(model: Any, reader: Any, source: str) -> None:
    """Make a model that transformers has read a plain one, and log the types of its tensors.

    DataError: a tensor of the file has no place in the model.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    if quantiser := getattr(model, "hf_quantizer", None):
        quantiser.remove_quantization_config(model)
    name = _value(reader, "general.architecture", "")
    kind = next(kind for kind, known in MODEL_ARCH_NAMES.items() if known == name)
    places = get_tensor_name_map(kind, _value(reader, f"{name}.block_count", 0))
    used = {places.get_name(own, (".weight", ".bias")) for own in model.state_dict()} | {FACTORS}
    if unused := sorted({tensor.name for tensor in reader.tensors} - used):
        raise DataError(
            f"model={source}: the model of its config has no place for {unused[0]} of its tensors ({len(unused)})"
        )
    counts = ", ".join(f"{count} in {name}" for name, count in _types(reader).items())
    log.info("model=%s: a GGUF file, dequantised to %s: tensors %s", source, str(model.dtype)[6:], counts)


def _types(reader: Any) -> dict[str, int]:
    """The number of tensors of each type, the most frequent first."""
    return dict(Counter(tensor.tensor_type.name for tensor in reader.tensors).most_common())


def without_bar() -> Any:
    """A context without the bar of transformers, which would fill a log file."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())


def _cache() -> Path:
    return Path(os.environ.get("ATTNLAB_CACHE") or "~/.cache/attnlab").expanduser().absolute() / "gguf"


def _value(reader: Any, key: str, default: Any) -> Any:
    return default if key not in reader.fields else reader.fields[key].contents()


@contextmanager
def _reading(source: str) -> Iterator[None]:
    """Turn every error of the libraries inside the block into a DataError that names the file."""
    try:
        yield
    except AttnlabError:
        raise
    except Exception as error:  # foreign bytes raise many classes in numpy, gguf, tokenizers and transformers
        reason = " ".join(str(error).split())[:160]
        raise DataError(f"model={source}: cannot be read as a GGUF file ({reason})") from error


def _write(place: Path, path: Path, source: str, library: Any) -> None:
    """Write the files of :func:`folder` into an empty folder, so that transformers reads nothing beside the file."""
    from attnlab.pretrained.huggingface import family_for

    reader = opened(path, source)
    if (name := _value(reader, "general.architecture", None)) not in ARCHITECTURES:
        raise ConfigError(
            f"model={source}: the architecture {name!r:.40} is not supported; expected {', '.join(ARCHITECTURES)}"
        )
    _check_types(reader, source)
    notes: list[str] = []
    with _reading(source), without_bar():
        values = library.PreTrainedConfig.get_config_dict(place, gguf_file=str(path))[0]
        family = family_for(values["model_type"], source)
        config = _config(reader, values, source, notes) | {"architectures": [family.classes[values["model_type"]]]}
        if wrong := family.wrong(family.options_of(library.CONFIG_MAPPING[values["model_type"]].from_dict(config))):
            raise DataError(f"model={source}: {wrong}")
        words = library.AutoTokenizer.from_pretrained(
            place, gguf_file=str(path), local_files_only=True, trust_remote_code=False
        )
        _split(words, reader, notes)
        ends = {_value(reader, f"tokenizer.ggml.{name}_token_id", None) for name in ENDS} - {None}
    for note in notes:
        log.warning("model=%s: %s", source, note)
    words.save_pretrained(place)
    (place / "config.json").write_text(json.dumps(config))
    ids = {name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None}
    (place / "generation_config.json").write_text(json.dumps(ids | {"eos_token_id": sorted(ends)} if ends else ids))
    write_index(place, {"file": str(path), "about": {"file": "GGUF", "dequantised": _types(reader), "notes": notes}})


def _check_types(reader: Any, source: str) -> None:
    """ConfigError: gguf cannot dequantise a type of the file."""
    from gguf import dequantize

    for tensor in {tensor.tensor_type: tensor for tensor in reader.tensors if tensor.data.ndim}.values():
        try:
            dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError as error:
            raise ConfigError(
                f"model={source}: {tensor.name} is quantised as {tensor.tensor_type.name}, which gguf cannot read; "
                "give a file in F16, Q8_0, Q4_0, Q4_1 or K-quants"
            ) from error


def _config(reader: Any, config: dict[str, Any], source: str, notes: list[str]) -> dict[str, Any]:
    """The config of transformers, with what its reader leaves out. ConfigError: a value that is not supported."""
    name = str(_value(reader, "general.architecture", ""))
    values = {key.removeprefix(f"{name}."): field.contents() for key, field in reader.fields.items()
              if key.startswith(f"{name}.")}  # fmt: skip
    if missing := sorted(SIZES - values.keys()):
        raise DataError(f"model={source}: {name}.{missing[0]} is missing in its metadata")
    window = values.pop("attention.sliding_window", None) if name == "phi3" else None
    for key in sorted(key for key in values.keys() - KEYS if values[key]):
        if key.startswith(("attention.", "rope.")):
            raise ConfigError(f"model={source}: {name}.{key}={values[key]} is not supported")
        notes.append(f"{name}.{key}={values[key]!r:.40} is not used")
    if not EPSILONS & values.keys():
        raise DataError(f"model={source}: the epsilon of the norms is missing in its metadata")
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    width = values.get("attention.key_length") or config.get("head_dim")
    width = width or values["embedding_length"] // values["attention.head_count"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.get(key, width) != width:
            raise ConfigError(f"model={source}: {name}.{key}={values[key]}, and heads have a width of {width}")
    config = {key: value for key, value in config.items() if key not in ("_model_name_or_path", "rope_theta")}
    config["vocab_size"] = shapes["token_embd.weight"][-1]
    if name == "gpt2":
        return config | {"n_positions": values["context_length"], "n_inner": values["feed_forward_length"]}
    if name == "llama":
        config |= {key: part in shapes for key, part in
                   {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}.items()}  # fmt: skip
    if name in ("llama", "qwen3"):
        config["head_dim"] = width
    if window is not None:
        config["sliding_window"] = window
    return config | {"rope_parameters": _rotary(reader, values, width, source)}


def _rotary(reader: Any, values: Mapping[str, Any], width: int, source: str) -> dict[str, Any]:
    """The parameters of the rotary table. ConfigError: frequencies of another kind."""
    theta, kind = float(values.get("rope.freq_base", 10000.0)), values.get("rope.scaling.type", "none")
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == FACTORS), None)
    before, factor = values.get("rope.scaling.original_context_length"), values.get("rope.scaling.factor")
    if factors is not None:
        return _llama3(factors.astype(float).tolist(), theta, width, before or 8192, source)
    if kind == "none" or kind == "linear" and factor in (None, 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn" and before:
        return {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": before}
    raise ConfigError(f"model={source}: rope.scaling.type={kind} is not supported; expected none, linear or yarn")


def _llama3(factors: list[float], theta: float, width: int, before: int, source: str) -> dict[str, Any]:
    """The scaling of Llama 3 with the published bounds, 1 and 4. ConfigError: it has not these factors."""
    rotary = {"rope_type": "llama3", "rope_theta": theta, "factor": max(factors), "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": before}  # fmt: skip
    for i, factor in enumerate(factors):
        turns = before * theta ** (-2 * i / width) / (2 * math.pi)  # in the original's positions
        share = min(max((turns - 1.0) / 3.0, 0.0), 1.0)
        if not math.isclose(factor, 1 / (share + (1 - share) / max(factors)), rel_tol=1e-4):
            raise ConfigError(f"model={source}: {FACTORS} has other factors than Llama 3's scaling; not supported")
    return rotary


def _split(words: Any, reader: Any, notes: list[str]) -> None:
    """Complete a tokenizer of byte pairs by what transformers does not read of how the file splits a text."""
    from tokenizers import pre_tokenizers

    if _value(reader, "tokenizer.ggml.model", "") != "gpt2":
        if not _value(reader, "tokenizer.ggml.add_space_prefix", True) and words.tokenize("a")[0] != "a":
            notes.append("tokenizer.ggml.add_space_prefix=false is not used: a text begins with a space")
        return
    kind = _value(reader, "tokenizer.ggml.pre", "default")
    if kind in BEGUN and "tokenizer.ggml.add_bos_token" not in reader.fields:
        words.add_bos_token = True
    backend = words.backend_tokenizer
    if json.loads(backend.to_str())["pre_tokenizer"]["type"] != "ByteLevel" or kind in LIKE_GPT2:
        return  # transformers has read it, or it is GPT-2's
    if kind in DIGITS:
        parts = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence(list(parts))
    else:
        notes.append(f"tokenizer.ggml.pre={kind} is unknown: words are split as by GPT-2, and ids may differ")
