"""Every mechanism in conf/attention/, small, built from the configuration a run composes."""

from functools import cache
from typing import NamedTuple

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from attnlab.attention import Attention, Cache
from attnlab.config.build import CONF, GROUPS, instantiate, knob_paths

NAMES = sorted(path.stem for path in (CONF / "attention").glob("*.yaml"))
TINY = ("task.model.d_model=32", "task.attention_heads=4", "task.attention_dropout=0.0")
WIDE = ("task.attention_heads=12", "task.attention_head_dim=64")  # steps in factor space take fewer multiply-adds


@cache
def _composed(name: str, *groups: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [f"attention={name}", *groups])


def composed(name: str, *overrides: str) -> DictConfig:
    """What `attention=<name>` and the overrides give a run.  Composing takes a while: once per choice of groups."""
    groups = [override for override in overrides if override.partition("=")[0] in GROUPS]
    values = [override for override in overrides if override not in groups]
    cfg = OmegaConf.merge(_composed(name, *groups), OmegaConf.from_dotlist(values))
    assert isinstance(cfg, DictConfig)
    return cfg


class Mechanism(NamedTuple):
    name: str
    stride: int | None = None  # set where the configuration refers to ${stride}
    wide: bool = False  # many wide heads, for mechanisms that compute a step in the cheaper of two ways

    def __str__(self) -> str:
        return self.name + ("" if self.stride is None else f"-s{self.stride}") + ("-wide" if self.wide else "")

    @property
    def grid(self) -> int:
        """Lengths around multiples of this are where a mechanism that merges neighbours goes wrong."""
        return 2 if self.stride is None else self.stride

    def make(self, *overrides: str) -> Attention:
        """The module as it is configured, its own initial values, float32."""
        knobs = () if self.stride is None else (f"stride={self.stride}",)
        return instantiate(composed(self.name, *knobs, *overrides).attention)

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
    return (1, 2, 3, 4) if knob_paths(composed(name), "stride") else (None,)


EVERY = [Mechanism(name, stride) for name in NAMES for stride in strides(name)]
TWO_WAYS = [Mechanism(name, wide=True) for name in NAMES if hasattr(Mechanism(name).make(), "in_factor_space")]


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


def extend_by(attention: Attention, x: Tensor, cache: Cache, chunks: list[int]) -> Tensor:
    assert sum(chunks) == x.shape[1]
    return torch.cat([attention.extend(piece, cache) for piece in x.split(chunks, dim=1)], 1)


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference, in units of the wanted tensor's root mean square (absolute where that is zero)."""
    got, want = got.detach().double(), want.detach().double()
    scale = want.square().mean().sqrt()
    return float((got - want).abs().max() / torch.where(scale > 0, scale, torch.ones_like(scale)))
