"""Back from compressed layers to timm's own."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from attnlab.compression.modules.attention import FactoredAttention, LowRankLinear, SlimAttention
from attnlab.errors import ConfigError

log = logging.getLogger(__name__)
ROUNDING = 1e-6


def densify(model: nn.Module, *, exact: bool = True) -> dict[str, Tensor]:
    """A state dict of the timm model that `model` was made from; it computes the same.

    A head whose effective query-key matrix has a higher rank than a dense head is wide (a free fusion, CP SlimAtt)
    cannot be written so: ConfigError, or with exact=False the nearest matrix, and a warning that names the error.
    """
    state = dict(model.state_dict())
    for path, module in model.named_modules():
        if isinstance(module, LowRankLinear):
            first, second = module[0], module[1]
            assert isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
            weight = (second.weight.double() @ first.weight.double()).to(second.weight.dtype)
            _put(state, path, {"weight": weight} | ({"bias": second.bias} if second.bias is not None else {}))
        elif isinstance(module, FactoredAttention | SlimAttention):
            layer, error = _attention(module)
            if error > ROUNDING and exact:
                raise ConfigError(
                    f"{path}: its heads mix to a higher rank than a dense head has (relative error {error:.2g}); "
                    "densify(model, exact=False) takes the nearest"
                )
            if error > ROUNDING:
                log.warning("%s: not exact, relative error %.2g", path, error)
            _put(state, path, layer)
    return {name: value.detach().clone() for name, value in state.items()}


def _put(state: dict[str, Tensor], path: str, values: dict[str, Tensor]) -> None:
    for name in [name for name in state if name.startswith(f"{path}.")]:
        del state[name]
    state |= {f"{path}.{name}": value for name, value in values.items()}


@torch.no_grad()
def _attention(module: FactoredAttention | SlimAttention) -> tuple[dict[str, Tensor], float]:
    """qkv and proj of a dense layer, in the original order of heads, and the relative error of its query-key tensor."""
    width = round(module.scale**-2)
    weight = module.qkv.weight.double()
    query, key, value = weight.split([module.rank, module.rank, module.value_rank])
    query = torch.cat([query, module.query_bias.double()[:, None]], -1)  # (R, F + 1)
    output = module.proj.weight.double()
    heads = list(range(module.num_heads)) if isinstance(module, SlimAttention) else module.heads
    begin, lost, square = 0, 0.0, 0.0
    parts: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
    mixing = _column_weights(module)
    for g, (head, value_rank) in enumerate(zip(heads, module.value_ranks, strict=True)):
        mine = mixing[g].nonzero()[:, 0]
        left, right = (query[mine] * mixing[g, mine][:, None]).T, key[mine].T
        if len(mine) > width:
            (q, r), (p, s) = torch.linalg.qr(left), torch.linalg.qr(right)
            u, values, vh = torch.linalg.svd(r @ s.T)
            root = values[:width].sqrt()
            left, right = q @ (u[:, :width] * root), p @ (vh[:width].T * root)
            lost, square = lost + float(values[width:].square().sum()), square + float(values.square().sum())
        else:
            square += float(((left.T @ left) * (right.T @ right)).sum())
        v, o = value[begin : begin + value_rank].T, output[:, begin : begin + value_rank]
        parts[head] = tuple(  # type: ignore[assignment]
            nn.functional.pad(part, (0, width - part.shape[-1])) for part in (left, right, v, o)
        )
        begin += value_rank
    q, k, v, o = (torch.cat([parts[h][i] for h in sorted(parts)], -1) for i in range(4))
    bias = torch.cat([q[-1], q.new_zeros(2 * q.shape[-1])])
    found = {"qkv.weight": torch.cat([q[:-1], k, v], -1).T, "qkv.bias": bias, "proj.weight": o}
    found = {name: tensor.to(module.qkv.weight.dtype) for name, tensor in found.items()}
    return found | {"proj.bias": module.proj.bias}, (lost / square) ** 0.5 if square else 0.0


def _column_weights(module: FactoredAttention | SlimAttention) -> Tensor:
    """(H, R): what each column counts for each head."""
    if isinstance(module, SlimAttention):
        return module.fusion.double()
    fusion = torch.eye(module.num_heads).to(module.query_bias) if module.fusion is None else module.fusion
    repeats = torch.tensor(module.ranks, device=fusion.device)
    return fusion.double().repeat_interleave(repeats, -1)
