"""Base class of the families of language models: Hugging Face's classes, described by their configs."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from attnlab.errors import ConfigError
from attnlab.pretrained import hub
from attnlab.pretrained.base import ATTENTION, Family, Layer
from attnlab.pretrained.weights import first_line

PLAIN = ("Linear", "Conv1D")  # of torch and transformers; other classes have quantised or adapted weights
COMMON = frozenset(
    {"model_type", "vocab_size", "initializer_range", "use_cache", "tie_word_embeddings"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)  # options of every family


class LanguageModel(Family):
    """Models of transformers with layers of one kind and size.

    Attributes:
        classes: name of the class in transformers by `model_type`, the architecture in config.json.
        blocks: path of the list of layers.
        known: configs of published models by hub name, for sizes without a network: where they differ from the
            defaults of transformers, which are the sizes of such a model.
    """

    classes: ClassVar[dict[str, str]]
    blocks: ClassVar[str]
    known: ClassVar[dict[str, dict[str, Any]]] = {}

    @abstractmethod
    def layer(self, config: Any, path: str, index: int) -> Layer:
        """Layer number `index` by the sizes in a config; biases are added from the model."""

    def matches(self, model: nn.Module) -> bool:
        kind = type(model)
        return kind.__module__.startswith("transformers.models.") and kind.__name__ in self.classes.values()

    def layers(self, model: nn.Module) -> list[Layer]:
        config: Any = model.config
        shared = _shared(model)
        described = []
        for i, _ in enumerate(model.get_submodule(self.blocks).children()):
            layer = self.layer(config, f"{self.blocks}.{i}", i)
            projections = {
                name: replace(place, bias=getattr(model.get_submodule(place.path), "bias", None) is not None)
                for name, place in layer.projections.items()
            }
            kind = type(model.get_submodule(layer.attention or "")).__name__
            refusals = {
                "products": f"{layer.attention}: {kind}: methods of query-key and value-output products support the "
                "attention of vision transformers alone; tensorllm, laser and trawl work on language models"
            }
            for subject, names in (("attention", ATTENTION), ("mlp", layer.matrices)):
                reasons = [reason for name in names if (reason := _refusal(model, layer, name, shared))]
                refusals |= {subject: reasons[0]} if reasons else {}
            described.append(replace(layer, projections=projections, refusals=refusals))
        return described

    def options_of(self, config: Any) -> dict[str, Any]:
        """The options of `create` for the architecture of a config."""
        values = {key: getattr(config, key) for key in sorted(self.options) if hasattr(config, key)}
        return values | {"model_type": config.model_type}

    def config(self, name: str, options: dict[str, Any]) -> Any:
        """A config of transformers. ConfigError: an unknown model type or option, or an invalid value.

        Args:
            name: a name of `known`, or any other name if the options have `model_type`.
        """
        transformers = hub.transformers()
        values = {**self.known.get(name, {}), **options}
        kind = values.pop("model_type", None)
        if kind not in self.classes:
            raise ConfigError(f"{name}: model_type {kind!r}: the family {self.name} has {', '.join(self.classes)}")
        if unknown := sorted(values.keys() - self.options):
            raise ConfigError(
                f"{name}: the option {unknown[0]!r} is unknown; expected only {', '.join(sorted(self.options))}"
            )
        try:
            return transformers.CONFIG_MAPPING[kind](**values)
        except Exception as error:  # of strict dataclasses, validators or arithmetic
            raise ConfigError(f"{name}: {kind} refuses its sizes: {first_line(error)}") from error

    def create(self, name: str, options: dict[str, Any]) -> nn.Module:
        config = self.config(name, options)
        try:
            model: nn.Module = getattr(hub.transformers(), self.classes[config.model_type])(config)
        except (TypeError, ValueError, AssertionError, ZeroDivisionError, KeyError, RuntimeError) as error:
            raise ConfigError(f"{name}: {config.model_type} refuses its sizes: {first_line(error)}") from error
        return model.eval()

    def empty(self, name: str, options: dict[str, Any]) -> nn.Module:
        from transformers.initialization import no_init_weights

        # not on meta: buffers without stored weights (rotary frequencies) are computed, in float32 as by transformers
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with no_init_weights():
                model = cast(self.create(name, options), dtype)
        finally:
            torch.set_default_dtype(dtype)
        model.tie_weights()  # type: ignore[operator]
        return model


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the parameters in place; buffers (rotary frequencies) keep their dtype, as in from_pretrained."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _shared(model: nn.Module) -> dict[int, list[str]]:
    """The names of each shared parameter, by its id."""
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(parameter), []).append(name)
    return {key: names for key, names in names_by_id.items() if len(names) > 1}


def _refusal(model: nn.Module, layer: Layer, name: str, shared: dict[int, list[str]]) -> str | None:
    """The reason why a projection can be neither read nor replaced, or None."""
    place = layer.projections[name]
    module = model.get_submodule(place.path)
    kind = type(module)
    library = kind.__module__.partition(".")[0]
    if library == "attnlab":
        return f"{place.path} is compressed already; start from an uncompressed model"
    weight = getattr(module, "weight", None)
    plain = kind.__name__ in PLAIN and library in ("torch", "transformers")
    if not plain or weight is None or not weight.is_floating_point():
        return (
            f"{place.path} is a {kind.__module__}.{kind.__name__}: its weights are quantised or have adapters; "
            "start from a model in float32, float16 or bfloat16"
        )
    if others := [other for other in shared.get(id(weight), []) if other != f"{place.path}.weight"]:
        return f"{place.path}.weight is shared with {others[0]}: one cannot be changed without the other"
    return None
