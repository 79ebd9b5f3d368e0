"""One decoding step in latent space on a CPU: few kernels, which write where the results are read."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from .ops.decode import products
from .ops.rope import Turn, turn


class LatentStep:
    """Buffers of one step, and views of the cache, made once: making a view takes as long as a small kernel.

    Weights that change in place are followed. Hooks that are registered later are not called.

    Args:
        slots, prefix: buffers of the cache, [latent | rotary key] (B, K, r + d_r) of the text and (N, P, r + d_r).
        up_key, up_value: projections between latents and heads, (H, d_n, r), with the scale of logits, and (H, r, d_v).
        query, down, norm, out: modules of the mechanism.

    Attributes:
        row: the newest [latent | rotary key], (B, r + d_r), where a caller asks for it; `row_turned` is the latter as
            (B, 1, 2, d_r / 2).
    """

    def __init__(
        self,
        slots: Tensor,
        prefix: Tensor,
        up_key: Tensor,
        up_value: Tensor,
        scale: float,
        query: nn.Module,
        down: nn.Module,
        norm: nn.Module,
        out: nn.Module,
    ) -> None:
        self.slots, self.prefix, self.up_key, self.up_value, self.scale = slots, prefix, up_key, up_value, scale
        self.heads, head_dim, r = up_key.shape
        rows, pairs = len(slots), (slots.shape[-1] - r) // 2
        self.pairs, self.query_widths, self.widths = pairs, [head_dim, 2 * pairs], [r, 2 * pairs]
        self._query, self._down, self._out = (applied(module) for module in (query, down, out))
        self._norm = norm
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
            opens: whether it is the slot's first position, which forgets what the slot contained.
        """
        merged = self.latents.select(1, slot)
        if opens:
            torch.mul(latent, gate, out=merged)
        else:
            merged.addcmul_(latent, gate)
        self.turn_into(self.turned.select(1, slot), key, angles)

    def newest(self, latent: Tensor, key: Tensor, angles: Turn) -> Tensor:
        """`row`, written: of latents (B, r) and rotary keys (B, d_r), which are not rotated yet."""
        self._row_latent.copy_(latent)
        self.turn_into(self.row_turned, key, angles)
        return self.row

    def read(
        self,
        used: int,
        prefix_slots: int,
        prefix_mask: Tensor | None,
        text_mask: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Outputs (B, 1, d) of the queries of `project`, over the first `used` slots of the text.

        Args:
            used: text slots that are read at most.
            prefix_mask: which slots of the prefixes exist, (N, P) bool; None: all.
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
            read = products(self.q, key, value, 1, text_mask, before, values, prefix_mask)
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
