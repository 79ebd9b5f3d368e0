"""Export of a language model as a folder with modelling files, for transformers with trust_remote_code=True."""

import hashlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnlab.errors import ConfigError
from attnlab.export import sources
from attnlab.models import LanguageModel

CODE = "attnlab.export.modeling_attnlab"
# transformers uses one model class for one config class, and one config class for config files of equal content in
# folders of equal name: without the mark the second of two such folders would be built with the code of the first.
MARK = "\n# SHA-256 of the code of this folder, which makes its config class one of its own: {}\n"
REGISTRY = "attnlab.export.classes"  # written for each folder


def config_of(
    model: LanguageModel, cfg: DictConfig, layers: Sequence[Mapping[str, Any]] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The content of config.json, and the module of each of its classes.

    Args:
        layers: the nodes of each layer's attention in a converted model; None: `cfg.attention`.

    Raises:
        ConfigError: the `_target_` of a node of `task.model` or `attention` is not a class.
    """
    pattern = cfg.attention.get("pattern")
    nodes = [cfg.attention] if pattern is None else [cfg.attention.mechanisms[name] for name in pattern]
    if layers is not None:
        nodes = [OmegaConf.create(dict(layer)) for layer in layers]
    modules: dict[str, str] = {}
    config = {
        "model_type": "attnlab",
        "architectures": ["AttnlabForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_attnlab.AttnlabConfig",
            "AutoModelForCausalLM": "modeling_attnlab.AttnlabForCausalLM",
        },
        "model": _described(OmegaConf.to_container(cfg.task.model, resolve=True), "task.model", modules),
        "mechanisms": [_described(OmegaConf.to_container(node, resolve=True), "attention", modules) for node in nodes],
        "hidden_size": model.attentions[0].d_model,
        "num_hidden_layers": len(model.attentions),
        "max_position_embeddings": model.longest,
        "tie_word_embeddings": False,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
    return config, modules


def code_of(modules: dict[str, str]) -> dict[str, str]:
    """The Python files of a folder, content by name, for the modules of the config's classes.

    ConfigError: a class has no source, or cannot be copied into a flat folder.
    """
    files = sources.flatten([CODE, *modules.values()], replaced=[REGISTRY])
    imports = [f"from .{sources.flat_name(module)} import {name}" for name, module in sorted(modules.items())]
    table = ", ".join(f'"{name}": {name}' for name in sorted(modules))
    files["classes.py"] = "\n".join(
        ['"""The classes that config.json names."""', "", *imports, "", f"CLASSES: dict[str, type] = {{{table}}}", ""]
    )
    content = "".join(f"{name}\n{files[name]}" for name in sorted(files))
    files["modeling_attnlab.py"] += MARK.format(hashlib.sha256(content.encode()).hexdigest())
    return files


def _described(node: Any, path: str, modules: dict[str, str]) -> Any:
    """A node as plain values with `class` instead of `_target_`; `modules` gets the module of the class."""
    if not isinstance(node, dict) or "_target_" not in node:
        return node
    target = str(node["_target_"])
    cls = pkgutil.resolve_name(target)
    if not isinstance(cls, type) or node.get("_partial_"):
        raise ConfigError(f"{path}._target_={target}: only classes can be exported with their code")
    name = cls.__name__
    if modules.setdefault(name, cls.__module__) != cls.__module__:
        raise ConfigError(f"{path}: {modules[name]} and {cls.__module__} both have a class {name}; rename one")
    values = {key: _described(value, f"{path}.{key}", modules) for key, value in node.items() if key[0] != "_"}
    return {"class": name, **values}
