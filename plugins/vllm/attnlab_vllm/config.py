"""The config of an exported folder, and what the plugin refuses."""

from collections.abc import Iterator
from typing import Any

from attnlab.export.modeling_attnlab import AttnlabConfig
from vllm.config import VllmConfig

MODELS = {"T6", "Decoder"}
MECHANISMS = {
    "MHA", "MLA", "MLAQueryLatent", "MTLA", "TPA", "TPAKVOnly", "TPANonContextualA", "TPANonContextualB", "TPASharedB",
}  # fmt: skip
VALUES = {"Llama3Scaling"}  # classes of arguments
WITHOUT_PAGES = {
    "SlidingWindow": "it stores the newest positions in a ring",
    "MLAWindow": "it stores a window of keys and values beside its latents",
    "MTLAWindow": "it stores a window of single positions beside its merged slots",
    "Multilinear": "it stores a state of fixed size",
}


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
            _check("mechanisms", node, MECHANISMS)
        self.num_attention_heads = max(int(node["num_heads"]) for node in self.mechanisms)


def _check(key: str, node: dict[str, Any], known: set[str]) -> None:
    for name in (node.get("class"), *_nested(node)):
        if name not in known | VALUES:
            reason = next((f": {why}" for kind, why in WITHOUT_PAGES.items() if str(name).startswith(kind)), "")
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
    cache, model = engine.cache_config, engine.model_config
    for setting, found, reason in (
        ("--speculative-config", engine.speculative_config, "a rejected token cannot be taken out of a merged slot"),
        ("--kv-transfer-config", engine.kv_transfer_config, "pages are not moved out of the engine, nor offloaded"),
        ("--tensor-parallel-size", engine.parallel_config.world_size > 1, "weights and caches are not divided"),
        ("--kv-cache-dtype", cache.cache_dtype != "auto", "a cache has the dtype of the model"),
        ("--quantization", model.quantization, "weights are read as they were exported"),
        ("--enable-prompt-embeds", model.enable_prompt_embeds, "a prompt consists of tokens"),
    ):
        if found:
            raise ValueError(f"attnlab-vllm: {setting} is not supported: {reason}; leave it out")
