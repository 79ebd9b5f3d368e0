"""The config of an exported folder, and what the plugin refuses."""

from collections.abc import Iterator
from typing import Any

from vllm.config import VllmConfig

from attnlab.export.modeling_attnlab import AttnlabConfig
from attnlab.export.serving import MECHANISMS

MODELS = {"T6", "Decoder"}
VALUES = {"Llama3Scaling"}  # classes of arguments
WITHOUT_PAGES = {"MultiLinear": "its state has a fixed size"}


class ServedConfig(AttnlabConfig):
    """`AttnlabConfig` of a model that the plugin can decode.

    ValueError: config.json names another class than those above.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if not self.model:  # the default config, which transformers compares with
            return
        _check("model", self.model, MODELS)
        for node in self.mechanisms:
            _check("mechanisms", node, set(MECHANISMS))
        self.num_attention_heads = max(int(node["num_heads"]) for node in self.mechanisms)


def _check(key: str, node: dict[str, Any], known: set[str]) -> None:
    for name in (node.get("class"), *_nested(node)):
        if name not in known | VALUES:
            reason = next((f": {why}" for kind, why in WITHOUT_PAGES.items() if str(name).endswith(kind)), "")
            raise ValueError(
                f"config.json: {key}: {name} cannot be decoded by attnlab-vllm{reason}; expected one of "
                f"{', '.join(sorted(known))}"
            )


def _nested(node: dict[str, Any]) -> Iterator[Any]:
    """The classes of the arguments of a node."""
    for value in node.values():
        if isinstance(value, dict):
            yield value.get("class")
            yield from _nested(value)


def check_engine(engine: VllmConfig) -> None:
    """ValueError: the engine has a setting with which the caches of the plugin would not be right."""
    cache, model, devices = engine.cache_config, engine.model_config, engine.parallel_config.world_size
    for setting, found, reason in (
        ("--speculative-config", engine.speculative_config, "a rejected token cannot be taken out of a merged slot"),
        ("--kv-transfer-config, --kv-offloading-size", engine.kv_transfer_config, "pages stay in the engine"),
        ("--tensor-parallel-size, --pipeline-parallel-size", devices > 1, "a model is not split"),
        ("--kv-cache-dtype", cache.cache_dtype != "auto", "a cache has the dtype of the model"),
        ("--quantization", model.quantization, "weights are read as they were exported"),
        ("--enable-prompt-embeds", model.enable_prompt_embeds, "a prompt consists of tokens"),
    ):
        if found:
            raise ValueError(f"attnlab-vllm: {setting}: not supported, because {reason}; leave it out")
