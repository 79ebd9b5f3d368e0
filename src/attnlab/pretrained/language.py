"""Base class of the families of language models: Hugging Face's classes, described by their configs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from attnlab.errors import ConfigError
from attnlab.pretrained import hub
from attnlab.pretrained.base import ATTENTION, Family, Layer, Projection
from attnlab.pretrained.weights import first_line

PLAIN = ("Linear", "Conv1D")  # of torch and transformers; other classes have quantised or adapted weights
COMMON = frozenset(
    {"model_type", "vocab_size", "initializer_range", "use_cache", "tie_word_embeddings"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)  # options of every family
BOUNDS = {
    r"num_.*|n_.*|.*_size|max_position_embeddings|head_dim|sliding_window": "at least 1",
    r".*_(dropout|pdrop|prob)": "at least 0 and less than 1",
    r".*_eps|.*_epsilon|rope_theta|rope_parameters\..*": "more than 0",
}  # by a pattern of the option's name
FULFILLED: dict[str, Callable[[float], bool]] = {
    "at least 1": lambda x: x >= 1,
    "at least 0 and less than 1": lambda x: 0 <= x < 1,
    "more than 0": lambda x: x > 0,
    "finite": lambda x: True,
}
DIVIDED = (("hidden_size", "num_attention_heads"), ("n_embd", "n_head"), ("num_attention_heads", "num_key_value_heads"))


class LanguageModel(Family):
    """Models of transformers with layers of one kind and size.

    Attributes:
        classes: name of the class in transformers by `model_type`, the architecture in config.json.
        blocks: path of the list of layers.
        attention: path of the attention module in a layer.
        mlp: path of the MLP in a layer.
        places: path in a layer of q, k, v and o, and of the MLP's matrices, of which the last gives the output.
        missing: what the layers have that those of :class:`attnlab.models.Decoder` do not; None: nothing.
        between: what attention does between or after its projections besides the products; None: nothing.
        transposed: weights are stored as (in, out), as by transformers' Conv1D.
        fixed: settings of a config that are no options, with the only value that is supported.
        known: configs of published models by hub name, for sizes without a network: where they differ from the
            defaults of transformers, which are the sizes of such a model.
    """

    classes: ClassVar[dict[str, str]]
    blocks: ClassVar[str]
    attention: ClassVar[str]
    mlp: ClassVar[str] = "mlp"
    places: ClassVar[dict[str, str]]
    missing: ClassVar[str | None] = None
    between: ClassVar[str | None] = "rotates queries and keys by their positions"
    transposed: ClassVar[bool] = False
    fixed: ClassVar[dict[str, bool]] = {"is_causal": True}
    known: ClassVar[dict[str, dict[str, Any]]] = {}

    def rows(self, part: int, heads: int, width: int) -> range | tuple[int, ...] | None:
        """The outputs of a fused module that are q (`part` 0), k (1) or v (2); None: each has a module."""
        return None

    def node(self, options: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Arguments of the attention of layer `index` of attnlab's decoder that other families do not have."""
        return {}

    def layer(self, config: Any, path: str, index: int) -> Layer:
        """Layer number `index` by the sizes in a config; biases are added from the model."""
        dim, heads = config.hidden_size, config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or dim // heads
        hidden = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * dim
        projections = {}
        for part, (name, place) in enumerate(self.places.items()):
            options: dict[str, Any] = {"transposed": self.transposed}
            shape = (dim, hidden) if part == len(self.places) - 1 else (hidden, dim)
            if name == "o":
                shape = dim, heads * width
                options |= {"axis": "in", "heads": heads}
            elif name in ATTENTION:
                count = heads if name == "q" else groups
                shape = count * width, dim
                options |= {"axis": "out", "heads": count, "rows": self.rows(part, heads, width)}
            projections[name] = Projection(f"{path}.{place}", shape, **options)
        return Layer(path, f"{path}.{self.attention}", f"{path}.{self.mlp}", projections, width**-0.5)

    def matches(self, model: nn.Module) -> bool:
        kind = type(model)
        return kind.__module__.startswith("transformers.models.") and kind.__name__ in self.classes.values()

    def layers(self, model: nn.Module) -> list[Layer]:
        config: Any = model.config
        described = []
        for i, _ in enumerate(model.get_submodule(self.blocks).children()):
            layer = self.layer(config, f"{self.blocks}.{i}", i)
            attention = type(model.get_submodule(layer.attention or ""))
            whole = attention.__module__.startswith("attnlab.")  # compressed as a whole: it has no projections
            projections = {
                name: replace(place, bias=getattr(model.get_submodule(place.path), "bias", None) is not None)
                for name, place in layer.projections.items()
                if not (whole and name in ATTENTION)
            }
            why = f"{attention.__name__} {self.between}: its weights do not multiply; use tensorllm, laser or trawl"
            refusals = {"products": f"{layer.attention}: {why}"} if self.between else {}
            for subject, names in (("attention", ATTENTION), ("mlp", layer.matrices)):
                paths = [projections[name].path if name in projections else layer.attention for name in names]
                reasons = [reason for path in paths if (reason := _refusal(model, str(path)))]
                refusals |= {subject: reasons[0]} if reasons else {}
            described.append(replace(layer, projections=projections, refusals=refusals))
        return described

    def options_of(self, config: Any) -> dict[str, Any]:
        """The options of `create` for the architecture of a config: those that its model type has.

        ConfigError: positions see others than those of this family, which no option says.
        """
        for key, usual in self.fixed.items():
            if (value := getattr(config, key, usual)) is not usual:
                raise ConfigError(f"{key}={value} is not supported; expected {str(usual).lower()}, or no such key")
        known = {*vars(type(config)()), "head_dim"}  # Qwen2 reads it from the config if it is there
        values = {key: getattr(config, key) for key in sorted(self.options & known) if hasattr(config, key)}
        if (values.get("pad_token_id") or 0) >= values["vocab_size"]:
            values["pad_token_id"] = None  # of a tokenizer that has more tokens; no embedding is masked
        return values | {"model_type": config.model_type}

    def wrong(self, options: Mapping[str, Any]) -> str | None:
        """The option that no model has, with what was expected, or None. Types are checked by transformers."""
        rotary = options.get("rope_parameters") or {}
        numbers = {**options, **{f"rope_parameters.{key}": value for key, value in rotary.items()}}
        for key, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            expected = next((bound for pattern, bound in BOUNDS.items() if re.fullmatch(pattern, key)), "finite")
            if not (math.isfinite(value) and FULFILLED[expected](value)):
                return f"{key}={value}: expected {expected}"
        functions = hub.transformers().activations.ACT2FN
        for key in ("hidden_act", "activation_function"):
            if options.get(key, "relu") not in functions:
                return f"{key}={options[key]}: expected one of {', '.join(functions)}"
        kinds = {"default", *hub.transformers().modeling_rope_utils.ROPE_INIT_FUNCTIONS}
        if (kind := rotary.get("rope_type", "default")) not in kinds:
            return f"rope_parameters.rope_type={kind}: expected one of {', '.join(sorted(kinds))}"
        for pair in DIVIDED:
            width, part = (options.get(key) for key in pair)
            if width and part and width % part and not (pair[0] == "hidden_size" and options.get("head_dim")):
                return f"{pair[1]}={part}: expected a divisor of {pair[0]}={width}"
        return None

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
            config = transformers.CONFIG_MAPPING[kind](**values)
        except Exception as error:  # of strict dataclasses, validators or arithmetic
            raise ConfigError(f"{name}: {kind} refuses its sizes: {first_line(error)}") from error
        if wrong := self.wrong(self.options_of(config)):
            raise ConfigError(f"{name}: {wrong}")
        return config

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


def _refusal(model: nn.Module, path: str) -> str | None:
    """The reason why the projection at a path can be neither read nor replaced, or None."""
    module = model.get_submodule(path)
    kind = type(module)
    library = kind.__module__.partition(".")[0]
    if library == "attnlab":
        return f"{path} is compressed already; start from an uncompressed model"
    plain = kind.__name__ in PLAIN and library in ("torch", "transformers")
    if plain and model.get_parameter(f"{path}.weight").is_floating_point():
        return None
    return (
        f"{path} is a {kind.__module__}.{kind.__name__}: its weights are quantised or have adapters; "
        "start from a model in float32, float16 or bfloat16"
    )
