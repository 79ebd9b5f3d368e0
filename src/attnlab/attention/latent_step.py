"""One decoding step in latent space on a CPU: few kernels, which write where the results are read."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .ops.decode import products
from .ops.rope import Turn, turn

if TYPE_CHECKING:
    from .mla import MLA, LatentCache


class LatentStep:
    """Buffers of one step, and views of the cache, made once: making a view takes as long as a small kernel.

    Args:
        attention: the mechanism.
        cache: of its own; `fits` says for how long. Weights that change in place are followed, hooks that are
            registered later are not called.

    Attributes:
        row: the newest [latent | rotary key], (B, r + d_r), where a caller asks for it; `row_turned` is the latter as
            (B, 1, 2, d_r / 2).
    """

    def __init__(self, attention: "MLA", cache: "LatentCache") -> None:
        self.slots, self.prefix = cache.text["slots"], cache.prefix["slots"]
        r, pairs, rows = attention.latent_dim, attention.rope_dim // 2, len(self.slots)
        self.heads, self.pairs, self.scale = attention.num_heads, pairs, attention.scale
        self.up_key, self.up_value = cache.up_key, cache.up_value
        self.query_widths, self.widths = [attention.head_dim, 2 * pairs], [r, 2 * pairs]
        self._query, self._down, self._out = (
            applied(module) for module in (attention.query, attention.down, attention.out)
        )
        self._norm = attention.norm
        self.q = self.slots.new_empty(rows, self.heads, r + 2 * pairs)
        self.row = self.slots.new_empty(rows, r + 2 * pairs)
        self.latents, self.turned = self._parts(self.slots)
        self._row_latent, self.row_turned = self._parts(self.row)
        self._absorbed = self.q[..., :r].transpose(0, 1)
        self._rotary = self.q[..., r:].unflatten(-1, (2, pairs))
        self._values = self.prefix[..., :r]

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        latent, rotary = rows.split(self.widths, -1)
        return latent, rotary.unflatten(-1, (1, 2, self.pairs))

    def fits(self, cache: "LatentCache") -> bool:
        """Whether the cache still has these buffers."""
        return cache.text["slots"] is self.slots

    def project(self, x: Tensor, angles: Turn) -> tuple[Tensor, Tensor]:
        """Inputs (B, 1, d): keeps their queries, and returns latents (B, r) and rotary keys, not rotated, (B, d_r).

        Args:
            x: inputs of the step.
        """
        x = x[:, 0]
        content, rotary = torch.split_with_sizes(self._query(x).view(len(x), self.heads, -1), self.query_widths, -1)
        self._absorbed.copy_(torch.bmm(content.transpose(0, 1), self.up_key))
        if self.pairs:
            turn(rotary.unflatten(-1, (2, self.pairs)), angles, self._rotary)
            self._rotary.mul_(self.scale)
        latent, key = torch.split_with_sizes(self._down(x), self.widths, -1)
        return self._norm(latent), key

    def turn_into(self, out: Tensor, key: Tensor, angles: Turn) -> None:
        """Rotate the newest rotary keys, (B, d_r), into (B, 1, 2, d_r / 2)."""
        if self.pairs:
            turn(key.unflatten(-1, (1, 2, self.pairs)), angles, out)

    def write(self, slot: int, latent: Tensor, key: Tensor, angles: Turn) -> None:
        """Store latents (B, r) and rotary keys (B, d_r), which are not rotated yet."""
        self.latents.select(1, slot).copy_(latent)
        self.turn_into(self.turned.select(1, slot), key, angles)

    def merge(self, slot: int, latent: Tensor, gate: Tensor, key: Tensor, angles: Turn, *, opens: bool) -> None:
        """Add gated latents (B, r) to a slot, whose rotary keys become these, (B, d_r), which are not rotated yet.

        Args:
            latent, key: of the position.
            gate: of the rows, (B, 1).
            opens: whether it is the slot's first position, and what the slot held is forgotten.
        """
        held = self.latents.select(1, slot)
        if opens:
            torch.mul(latent, gate, out=held)
        else:
            held.addcmul_(latent, gate)
        self.turn_into(self.turned.select(1, slot), key, angles)

    def kept(self, latent: Tensor, key: Tensor, angles: Turn) -> Tensor:
        """`row`, written: of latents (B, r) and rotary keys (B, d_r), which are not rotated yet."""
        self._row_latent.copy_(latent)
        self.turn_into(self.row_turned, key, angles)
        return self.row

    def read(
        self,
        cache: "LatentCache",
        used: int,
        prefix_slots: int,
        text_mask: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Outputs (B, 1, d) of the queries of `project`, over the first `used` slots of the text.

        Args:
            used: text slots that are read at most.
            text_mask: which of the first text slots exist, (B, columns) bool.
            counts: how many exist, (B,), in place of the mask.
        """
        if counts is not None:
            text_mask = torch.arange(used) < counts.unsqueeze(1)
        key, value = self.slots.narrow(1, 0, used), self.latents.narrow(1, 0, used)
        if not prefix_slots:
            read = products(self.q, key, value, 1, text_mask)
        else:
            before, values = (t.narrow(1, 0, prefix_slots) for t in (self.prefix, self._values))
            read = products(self.q, key, value, 1, text_mask, before, values, cache.prefix_mask)
        values = torch.bmm(read.transpose(0, 1), self.up_value)  # (H, B, d_v)
        return self._out(values.transpose(0, 1).reshape(len(read), -1)).unsqueeze(1)


def applied(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """What the module computes of (B, .): of a plain linear map, one call that makes no view of its weights.

    Args:
        module: a linear map, or another module, which is called as it is.
    """
    hooked = module._forward_hooks or module._forward_pre_hooks
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter or hooked:
        return module
    weight = module.weight.detach().mT
    if module.bias is None:
        return partial(torch.mm, mat2=weight)
    return partial(torch.addmm, module.bias.detach(), mat2=weight)
