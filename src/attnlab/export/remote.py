"""A language model as a folder with modelling files, which transformers loads with trust_remote_code=True."""

import hashlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnlab.errors import ConfigError
from attnlab.export import sources
from attnlab.models import LanguageModel

CODE = ("attnlab.export.configuration_attnlab", "attnlab.export.modeling_attnlab")
CONFIGURATION = "configuration_attnlab.py"
# transformers uses one model class for one config class, and takes config files of equal content, in folders of equal
# name, for one class: without the mark the second of two such folders would be built with the code of the first.
MARK = "\n# SHA-256 of the code of this folder, which makes its config class one of its own: {}\n"
REGISTRY = "attnlab.export.classes"  # written for each folder


def config_of(
    model: LanguageModel, cfg: DictConfig, layers: Sequence[Mapping[str, Any]] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """What config.json holds, and the module of each class that it names.

    Args:
        layers: what builds the attention of each layer, of a converted model; None: `cfg.attention`.

    Raises:
        ConfigError: a node of `task.model` or `attention` names something else than a class.
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
            "AutoConfig": "configuration_attnlab.AttnlabConfig",
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
    """The Python files of a folder, content by name, with the module of each class that the config names.

    ConfigError: a class has no source, or one that cannot be copied into a flat folder.
    """
    files = sources.flatten([*CODE, *modules.values()], replaced=[REGISTRY])
    imports = [f"from .{sources.flat_name(module)} import {name}" for name, module in sorted(modules.items())]
    table = ", ".join(f'"{name}": {name}' for name in sorted(modules))
    files["classes.py"] = "\n".join(
        ['"""The classes that config.json names."""', "", *imports, "", f"CLASSES: dict[str, type] = {{{table}}}", ""]
    )
    content = "".join(f"{name}\n{files[name]}" for name in sorted(files))
    files[CONFIGURATION] += MARK.format(hashlib.sha256(content.encode()).hexdigest())
    return files


def _described(node: Any, path: str, modules: dict[str, str]) -> Any:
    """A node as plain values with `class` in place of `_target_`; `modules` gets the module of the class."""
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
