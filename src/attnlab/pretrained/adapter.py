"""LoRA adapters beside the weights of a pretrained model, merged into them by peft."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

from attnlab.errors import ConfigError, DataError
from attnlab.pretrained.weights import first_line, tensors

log = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # the second is read with weights_only


def files(path: Path) -> list[Path]:
    """The files of an adapter's weights in a folder."""
    return [path / name for name in WEIGHTS if (path / name).is_file()]


def merged(model: Any, path: Path, source: str) -> Any:
    """The model with the adapter of its folder in its weights; `model` itself if there is none.

    Raises:
        DataError: an adapter that is damaged, of another kind than LoRA or for another model, or whose weights have
            no place in this one.
        ConfigError: peft is not installed.
    """
    config, weights = path / CONFIG, files(path)
    if not config.is_file() and not weights:
        return model
    if not config.is_file() or len(weights) != 1:
        raise DataError(f"model={source}: an adapter in {path} has {CONFIG} and one of {', '.join(WEIGHTS)}")
    try:
        values = json.loads(config.read_bytes())
        kind = str(values.get("peft_type"))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{config}: cannot be read as a JSON object ({first_line(error)})") from error
    if kind != "LORA" or values.get("megatron_config"):
        raise DataError(
            f"{config}: only LoRA is merged, got {kind}; merge it with peft (merge_and_unload), and save that"
        )
    stored = tensors(weights[0])
    if getattr(model.config, "tie_word_embeddings", False):
        tables = [part for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part is not None]
        names = {name.rpartition(".")[2] for name, part in model.named_modules() if any(part is x for x in tables)}
        if changed := sorted(name for name in stored if names & set(name.split("."))):
            raise DataError(
                f"{weights[0]}: {changed[0]} changes a table that is embedding and head in one; merge it into a model "
                "with tie_word_embeddings=false"
            )
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"model={source}: its LoRA adapter is merged by peft: pip install 'attnlab[lora]'") from error
    try:
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always", UserWarning)
            adapted = peft.get_peft_model(model, peft.LoraConfig.from_pretrained(str(path)))
            expected = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
            result: Any = peft.set_peft_model_state_dict(adapted, stored)
            if wrong := sorted({*(expected - stored.keys()), *result.unexpected_keys}):
                raise DataError(f"{wrong[0]} is missing in the file or in the model")
            whole = adapted.merge_and_unload(safe_merge=True)
    except Exception as error:  # of peft, torch or the strict classes of its configs
        raise DataError(f"{weights[0]}: no adapter of the model in {path}: {first_line(error)}") from error
    for message in messages:
        if issubclass(message.category, UserWarning):
            log.warning("model=%s: peft: %s", source, " ".join(str(message.message).split()))
    log.info("model=%s: the LoRA adapter of its folder is merged into its weights (%d tensors)", source, len(stored))
    return whole
