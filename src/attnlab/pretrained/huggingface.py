"""Language models from a local folder or the Hugging Face hub: configs, weights, tokenizers, export."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnlab.config.rules import GGUF
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained import families, family_of, gguf, hub
from attnlab.pretrained.language import LanguageModel
from attnlab.pretrained.weights import first_line, new_folder, write_files

log = logging.getLogger(__name__)

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja", GENERATION),
)
IDS_AND_OUTPUTS = {  # of a generation config: read, or without an effect on the text
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version"),
    *("_from_model_config", "output_attentions", "output_hidden_states", "use_cache", "cache_implementation"),
    *("max_length", "max_new_tokens", "return_dict_in_generate", "output_scores", "output_logits"),
}


def language_families() -> dict[str, LanguageModel]:
    """The families of language models by `model_type`."""
    return {
        kind: family for family in families().values() if isinstance(family, LanguageModel) for kind in family.classes
    }


def family_for(kind: Any, source: str) -> LanguageModel:
    """The family of a `model_type` of a config.json. ConfigError: unknown."""
    known = language_families()
    if kind == "attnlab":
        raise ConfigError(
            f"model={source}: an export with code, which attnlab never runs from a model's folder; give "
            "checkpoint=<its run>"
        )
    if str(kind) not in known:
        raise ConfigError(
            f"model={source}: the model_type {kind!r} is of no known family ({', '.join(sorted(known))}); "
            "a new one is a file in src/attnlab/pretrained"
        )
    return known[kind]


def config_of(source: str) -> dict[str, Any]:
    """The config of a model as options of `create`, with `model_type`; no weights are needed.

    In this order: a local folder, models whose sizes are known, the hub's cache, the hub.

    Raises:
        DataError: an unknown folder or name, an unreadable config, or quantised weights.
        ConfigError: an unknown family.
    """
    if not Path(source).expanduser().exists():
        for family in language_families().values():
            if source in family.known:
                return family.options_of(family.config(source, {}))
    path = hub.folder(source, weights=False)
    options = _options(path, source)
    kind = getattr(hub.transformers(), family_for(options["model_type"], source).classes[options["model_type"]])
    if options.get("tie_word_embeddings") and hub.is_untied(kind, path, source):
        options["tie_word_embeddings"] = False
    return options


def _options(path: Path, source: str) -> dict[str, Any]:
    values = hub.read_config(path, source)
    family = family_for(values.get("model_type"), source)
    kind, library = values["model_type"], hub.transformers()
    try:
        options = family.options_of(library.CONFIG_MAPPING[kind].from_dict(values))
    except Exception as error:  # of strict dataclasses or validators
        reason = " ".join(str(error).split())[:200]  # the first line may be the location alone
        raise DataError(f"{path / hub.CONFIG}: {kind} refuses it: {reason}") from error
    if wrong := family.wrong({**options, "rope_theta": values.get("rope_theta")}):
        raise DataError(f"{path / hub.CONFIG}: {wrong}")
    return options


def stored(source: str) -> dict[str, Any]:
    """What a record says of how the weights of a model are stored: {"weights": ...} of a GGUF file, else {}."""
    path = Path(source).expanduser()
    return {"weights": gguf.about(hub.folder(source))} if path.suffix == GGUF and path.is_file() else {}


def create(source: str, options: dict[str, Any] | None = None) -> nn.Module:
    """The architecture of a model, or of other `options`, with random weights, on the default device, in eval mode."""
    options = config_of(source) if options is None else options
    return family_for(options.get("model_type"), source).create(source, options)


def load(source: str, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> nn.Module:
    """Load a pretrained language model in eval mode; config and family are checked before the weights.

    Args:
        dtype: of the parameters; None: as stored.

    Raises:
        DataError: a missing, damaged or quantised model.
        ConfigError: an unknown family.
    """
    _options(hub.folder(source, weights=False), source)
    path = hub.folder(source)
    options, values = _options(path, source), hub.read_config(path, source)
    family = family_for(options["model_type"], source)
    for key in sorted(family.options & values.keys()):
        if values[key] and options.get(key) is None:
            log.warning("%s: %s=%s is not used by this model", path / hub.CONFIG, key, values[key])
    was = values.get("dtype") or values.get("torch_dtype")
    wanted = str(dtype or was).removeprefix("torch.")
    if was not in (None, wanted):
        log.info("model=%s: its weights are stored in %s and read in %s", source, was, wanted)
    kind = getattr(hub.transformers(), family.classes[options["model_type"]])
    model = hub.read_model(kind, family.config(source, options), path, source, dtype=dtype)
    return model.to(device) if device is not None else model


def options_of(model: nn.Module) -> dict[str, Any]:
    """The config of a model as options of `create` and of a compressed model's folder."""
    family, config = family_of(model), model.config
    assert isinstance(family, LanguageModel)
    return family.options_of(config)


def tokenizer(source: str) -> Any:
    """The tokenizer of a model, of transformers.

    One without a padding token, as Llama 2's and GPT-J's, pads with its end token, which attention masks hide.

    Args:
        source: a local folder of a model, also of a compressed one, or a name of the hub.

    Raises:
        DataError: a missing or damaged tokenizer, one that needs code of its folder, or one without padding and end
            tokens.
    """
    path = _folder(source)
    try:
        words = hub.transformers().AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of tokenizers, sentencepiece or transformers
        raise DataError(
            f"model={source}: no tokenizer can be read from {path} (expected tokenizer.json and "
            f"tokenizer_config.json, or the files of its kind): {first_line(error).rstrip(':')}"
        ) from error
    if words.pad_token is None:
        if words.eos_token is None:
            raise DataError(
                f"model={source}: the tokenizer in {path} has neither a padding token nor an end token; add "
                "pad_token to its tokenizer_config.json"
            )
        words.pad_token = words.eos_token
        log.info("model=%s: the tokenizer has no padding token; padding with its end token %s", source, words.eos_token)
    return words


def _folder(source: str) -> Path:
    """The folder of a model, also of a compressed one, which has no config."""
    path = Path(source).expanduser()
    return path if path.is_dir() else hub.folder(source, weights=False)


def tokenizer_files(source: str) -> dict[str, bytes]:
    """The files of a model's tokenizer, chat templates and generation config, by their paths in its folder.

    DataError: a file cannot be read.
    """
    place = _folder(source)
    try:
        files = sorted(path for name in TOKENIZER_FILES for path in place.glob(name))
        return {path.relative_to(place).as_posix(): path.read_bytes() for path in files}
    except OSError as error:
        raise DataError(f"model={source}: {error.filename} cannot be read ({error.strerror})") from error


def copy_tokenizer(words: Any, folder: Path) -> None:
    """Write a tokenizer into a folder: the files from which it was read, or one that was made in memory."""
    place = Path(words.name_or_path)
    if words.name_or_path and place.is_dir():
        write_files(tokenizer_files(str(place)), folder)
    else:
        words.save_pretrained(folder)


def generation(source: str, config: Mapping[str, Any] | None = None) -> tuple[list[int], dict[str, Any]]:
    """The generation config of a model.

    Args:
        config: the model's config, which has the ids where there is no such file; None: :func:`config_of`.

    Returns:
        The ids at which `generate` of transformers ends a text, if any, and the other settings that choose tokens.

    DataError: its file cannot be read, or its ids are no ids.
    """
    file, kind = hub.folder(source, weights=False) / GENERATION, hub.transformers().GenerationConfig
    try:
        if file.is_file():
            values = kind.from_dict(dict(json.loads(file.read_bytes()).items()))
        else:
            values = kind(eos_token_id=(config_of(source) if config is None else config).get("eos_token_id"))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:  # of json and its validators
        raise DataError(f"{file}: cannot be read as a generation config ({first_line(error)})") from error
    ends = values.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if wrong := [end for end in ends if type(end) is not int or not 0 <= end < 1 << 31]:
        raise DataError(f"{file}: eos_token_id: expected ids, got {wrong[0]!r}")
    return ends, {name: value for name, value in values.to_diff_dict().items() if name not in IDS_AND_OUTPUTS}


def export(model: nn.Module, folder: Path, source: str | None = None) -> None:
    """Write a plain Hugging Face checkpoint, which transformers loads without attnlab.

    Args:
        folder: replaced when the new one is complete.
        source: a model's folder or hub name, for copies of its tokenizer's files and its generation config; None: none.

    Raises:
        ConfigError: the model is compressed.
        WriteError: the folder cannot be written.
    """
    files = {} if source is None else tokenizer_files(source)
    if source is not None:
        tokenizer(source)  # refuses a damaged one
    with new_folder(folder) as partial:
        model.save_pretrained(partial)  # type: ignore[operator]
        write_files(files, partial)
    log.info("%s: a Hugging Face checkpoint", folder)
