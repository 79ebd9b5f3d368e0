"""Every mechanism in conf/attention/, small, built from the configuration a run composes."""

import copy
from functools import cache
from typing import NamedTuple

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from attnlab.attention import Attention, Cache, MTLAWindow
from attnlab.attention.ops import naive
from attnlab.config.build import CONF, GROUPS, instantiate, knob_paths

NAMES = sorted(path.stem for path in (CONF / "attention").glob("*.yaml") if path.stem != "hybrid")  # a stack of them
TINY = ("task.model.d_model=32", "task.attention_heads=4", "task.attention_dropout=0.0")
WIDE = ("task.attention_heads=12", "task.attention_head_dim=64")  # steps in factor space take fewer multiply-adds


@cache
def _composed(name: str, *groups: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [f"attention={name}", *groups])


def composed(name: str, *overrides: str) -> DictConfig:
    """What `attention=<name>` and the overrides give a run."""
    return copy.deepcopy(configured(name, *overrides))


@cache
def configured(name: str, *overrides: str) -> DictConfig:
    """`composed`, shared by its callers, which must not change it: composing takes a while, and merging a little."""
    groups = [override for override in overrides if override.partition("=")[0] in GROUPS]
    values = [override for override in overrides if override not in groups]
    cfg = OmegaConf.merge(_composed(name, *groups), OmegaConf.from_dotlist(values))
    assert isinstance(cfg, DictConfig)
    return cfg


class Mechanism(NamedTuple):
    name: str
    stride: int | None = None  # set where the configuration refers to ${stride}
    window: int | None = None  # shorter than the tests' texts, where the configuration has a window that slides
    wide: bool = False  # many wide heads, for mechanisms that compute a step in the cheaper of two ways
    choice: str | None = None  # KEY=VALUE, where the configuration has a choice beside its default
    sinks: int | None = None  # first positions that stay, where the configuration has a window that slides

    def __str__(self) -> str:
        parts = {"-s": self.stride, "-w": self.window, "-first": self.sinks}
        return (
            self.name
            + "".join(f"{k}{v}" for k, v in parts.items() if v)
            + ("-wide" if self.wide else "")
            + (f"-{self.choice}" if self.choice else "")
        )

    @property
    def grid(self) -> int:
        """Lengths around multiples of this are where a mechanism that merges neighbours goes wrong."""
        return 2 if self.stride is None else self.stride

    def make(self, *overrides: str) -> Attention:
        """The module as it is configured, with its initial values, float32."""
        values = {"stride": self.stride, "attention.window": self.window}
        values["attention.sinks"] = self.sinks
        if "recent" in configured(self.name).attention:  # short, so that the tests' texts have merged chunks
            values |= {"attention.recent": 2, "attention.first": 1}
        knobs = [f"{key}={value}" for key, value in values.items() if value is not None]
        knobs += [f"attention.{self.choice}"] if self.choice else []
        return instantiate(configured(self.name, *knobs, *overrides).attention)

    def build(self, *overrides: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> Attention:
        """Small, with weights that make the softmax choose and every bias and norm count."""
        attention = self.make(*TINY, *(WIDE if self.wide else ()), *overrides).to(dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in attention.parameters():
                wide = parameter.dim() > 1
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                value = noise * 1.3 / parameter.shape[-1] ** 0.5 if wide else 0.3 * noise + (parameter == 1)
                parameter.copy_(value)
        return attention.eval()


def strides(name: str) -> tuple[int | None, ...]:
    if "recent" in configured(name).attention:
        return (2,)  # with 1 it has no gates that could learn; more are in test_mtla_window.py
    return (1, 2, 3, 4) if knob_paths(configured(name), "stride") else (None,)


def windows(name: str) -> tuple[int | None, ...]:
    """The window as it is configured, which is longer than the tests' texts, and a short one."""
    slides = "window" in configured(name).attention and Mechanism(name).make(*TINY).max_positions is None
    return (None, 3) if slides else (None,)


EVERY = [Mechanism(name, s, w) for name in NAMES for s in strides(name) for w in windows(name)]
EVERY += [Mechanism(name, window=3, sinks=2) for name in NAMES if "sinks" in configured(name).attention]
CHOICES = ("core=softmax", "reuse=true", "branches=2")
EVERY += [
    Mechanism(name, choice=choice)
    for choice in CHOICES
    for name in NAMES
    if choice.partition("=")[0] in configured(name).attention
]
TWO_WAYS = [Mechanism(name, wide=True) for name in NAMES if hasattr(Mechanism(name).make(*TINY), "in_factor_space")]


def prefix_lengths(grid: int) -> Tensor:
    """Ragged: none, one, and around the first two multiples of the grid; the longest is 2 grid + 1."""
    return torch.tensor(sorted({0, 1, grid - 1, grid, grid + 1, 2 * grid - 1, 2 * grid, 2 * grid + 1}, reverse=True))


def random_chunks(total: int, generator: torch.Generator) -> list[int]:
    """A random way to split `total` positions, ones and everything at once among them."""
    limit = int(torch.randint(1, total + 1, (), generator=generator))
    chunks: list[int] = []
    while (left := total - sum(chunks)) > 0:
        chunks.append(min(left, int(torch.randint(1, limit + 1, (), generator=generator))))
    return chunks


def check_visibility(attention: Attention, batch: int, steps: int, prefix: Tensor | None) -> None:
    """By gradient: every position reads all of the prefix, exactly the text that is declared, and nothing later."""
    x = torch.randn(batch, steps, attention.d_model, dtype=torch.float64, requires_grad=True)
    inputs = [x] if prefix is None else [x, prefix.requires_grad_()]
    y = attention(x, prefix)
    for i in range(steps):
        declared = torch.zeros(steps, dtype=torch.bool)
        declared[list(attention.visible(i))] = True
        assert not declared[i + 1 :].any(), f"position {i} is declared to see the future"
        grads = torch.autograd.grad((y[:, i] * torch.randn_like(y[:, i])).sum(), inputs, retain_graph=True)
        read = (grads[0] != 0).any(-1)
        assert torch.equal(read, declared.expand_as(read)), (
            f"position {i} reads {read[0].nonzero().flatten().tolist()}, {type(attention).__name__}.visible declares "
            f"{declared.nonzero().flatten().tolist()}"
        )
        assert all((grad != 0).any(-1).all() for grad in grads[1:]), f"position {i} misses a part of the prefix"


def gates_of_other_steps(attention: Attention, context: int) -> int:
    """Multiply-adds by which a step at this position differs from the mean: `MTLAWindow` gates a chunk at a time.

    Args:
        attention: any mechanism.
        context: positions before and at the step, those of a prefix included.
    """
    if not isinstance(attention, MTLAWindow):
        return 0
    old, gate = context - attention.recent - attention.first, attention.gate_latent.weight.numel()
    return gate * (1 - attention.stride * (old > 0 and old % attention.stride == 0))


def extend_by(attention: Attention, x: Tensor, cache: Cache, chunks: list[int]) -> Tensor:
    assert sum(chunks) == x.shape[1]
    return torch.cat([attention.extend(piece, cache) for piece in x.split(chunks, dim=1)], 1)


def check_equations(attention: Attention, steps: int, lengths: Tensor, chunkings: list[list[int]]) -> None:
    """Forward, gradients and cached steps in every chunking after ragged prefixes are those of the naive form."""
    x = torch.randn(len(lengths), steps, attention.d_model, dtype=torch.float64, requires_grad=True)
    prefix = torch.randn(len(lengths), int(lengths.max()), attention.d_model, dtype=torch.float64, requires_grad=True)
    y = attention(x, prefix, prefix_lengths=lengths)
    want = torch.stack([naive.attend(attention, x[b], prefix[b, :size]) for b, size in enumerate(lengths.tolist())])
    assert error(y, want) < 1e-12
    g, inputs = torch.randn_like(y), [x, prefix, *attention.parameters()]
    for got, exact in zip(torch.autograd.grad(y, inputs, g), torch.autograd.grad(want, inputs, g), strict=True):
        assert error(got, exact) < 1e-11
    twice = x.detach().repeat_interleave(2, 0)  # prefixes are shared by two rows each
    for chunks in chunkings:
        cache = attention.new_cache(2 * len(lengths), steps, prefix.shape[1], prefix_batch=len(lengths))
        attention.read_prefix(prefix.detach(), lengths, cache)
        assert error(extend_by(attention, twice, cache, chunks), want.repeat_interleave(2, 0)) < 1e-12


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference, in units of the wanted tensor's root mean square (absolute where that is zero)."""
    got, want = got.detach().double(), want.detach().double()
    scale = want.square().mean().sqrt()
    return float((got - want).abs().max() / torch.where(scale > 0, scale, torch.ones_like(scale)))
