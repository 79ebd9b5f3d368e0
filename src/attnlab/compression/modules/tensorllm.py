"""Attention projections whose heads share two subspaces: a module with the factors, and a projection for each matrix.

W_i of head i of matrix m, (d, dv), is U1 M_mi U2.T with M_mi = sum_c U3[m, c] G[c, i] (TensorLLM, eq. 12 to 14).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.compression.modules.base import Dense, Replacement

Form = Literal["factors", "stacked", "merged", "joined", "dense"]


class HeadFactors(Replacement):
    """U1 (d, R1), U2 (dv, R2) and for each stack of matrices U3 (n, R3) and the core G (R3, h, R1, R2).

    A matrix whose outputs are heads ("out": q, k, v) computes x U1, then M_mi of every head, then U2.T; one whose
    inputs are heads ("in": o) does the same backwards. Matrices of one axis have the same input: their first product is
    computed once. The form with the fewest multiply-adds is used: "factors"; "stacked", with the product with G shared
    too and U3 after it; "merged", with M_mi U2.T multiplied out; "joined", with U1 M_mi multiplied out; or "dense", the
    matrix itself. Products of weights are cached until a weight changes. With gradients, which would need them in every
    batch, the last two are not used.

    Changes of the weights are detected by torch's count of in-place changes. Writing through `parameter.data` does not
    count: call `model.eval()` after it. `train()`, `eval()` and every forward pass with gradients clear the cache.

    Args:
        width: dv, of a head.
        ranks: R1 and R2.
        stacks: the `names` of its matrices, `heads` (h), and `rank`, R3; None: no U3, and a core of each matrix.
        axes: "out" or "in" by name of the matrix.
        absorbed: U1 and all cores are one matrix, (d, sum of R3 h R2), with equal results.
    """

    kind = "tensorllm"

    def __init__(
        self,
        dim: int,
        width: int,
        ranks: Sequence[int],
        stacks: Sequence[dict[str, Any]],
        axes: dict[str, str],
        absorbed: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.width, self.ranks, self.absorbed = dim, width, list(ranks), absorbed
        self.stacks, self.axes = [dict(stack) for stack in stacks], dict(axes)
        first, second = self.ranks
        self.columns = [(stack["rank"] or len(stack["names"])) * stack["heads"] * second for stack in self.stacks]
        self.u1 = nn.Parameter(torch.zeros(dim, sum(self.columns) if absorbed else first))
        self.u2 = nn.Parameter(torch.zeros(width, second))
        self.u3, self.cores = nn.ParameterDict(), nn.ParameterDict()
        for i, stack in enumerate(self.stacks):
            depth = stack["rank"] or len(stack["names"])
            if stack["rank"] is not None:
                self.u3[str(i)] = nn.Parameter(torch.zeros(len(stack["names"]), depth))
            if not absorbed:
                self.cores[str(i)] = nn.Parameter(torch.zeros(depth, stack["heads"], first, second))
        self.place = {name: (i, m) for i, stack in enumerate(self.stacks) for m, name in enumerate(stack["names"])}
        self.forms: dict[str, Form] = {axis: self._cheapest(axis) for axis in set(self.axes.values())}
        self.trained: dict[str, Form] = {axis: self._cheapest(axis, trained=True) for axis in self.forms}
        self._derived: dict[str, Any] = {}  # products of weights
        self._shared: dict[str, Any] = {}  # products with the last input

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_derived": {}, "_shared": {}}  # a copy computes its own products

    def layout(self) -> dict[str, Any]:
        names = ("dim", "width", "ranks", "stacks", "axes", "absorbed")
        return {name: getattr(self, name) for name in names}

    def multiply_adds(self, tokens: int) -> int:
        """0: each :class:`HeadProjection` counts its products."""
        return 0

    def dense(self) -> tuple[Dense, float]:
        return {}, 0.0

    def forward(self) -> None:
        raise RuntimeError("the factors are used by the projections that share them")

    # --- weights ------------------------------------------------------------------------------------------------

    def heads(self, name: str) -> int:
        """Number of heads of a matrix."""
        return int(self.stacks[self.place[name][0]]["heads"])

    def mixed(self, name: str) -> Tensor:
        """M_mi of every head, (h, R1, R2); when absorbed, U1 M_mi, (h, d, R2)."""
        i, m = self.place[name]
        if self.absorbed:
            part = self.u1.split(self.columns, 1)[i].unflatten(1, (-1, self.heads(name), self.ranks[1]))
            core = part.permute(1, 2, 0, 3)  # (R3, h, d, R2)
        else:
            core = self.cores[str(i)]
        return core[m] if str(i) not in self.u3 else torch.tensordot(self.u3[str(i)][m], core, 1)

    def parts(self, name: str) -> Tensor:
        """The heads of a matrix, (h, d, dv)."""
        mixed = self.mixed(name)
        return (mixed if self.absorbed else self.u1 @ mixed) @ self.u2.T

    # --- costs ----------------------------------------------------------------------------------------------------

    def costs(self, axis: str, form: Form) -> tuple[int, dict[str, int]]:
        """Multiply-adds of one token: of the product shared by the matrices of an axis, and of the rest of each."""
        names = [name for name in self.place if self.axes[name] == axis]
        (first, second), dv, d = self.ranks, self.width, self.dim
        if form == "dense":
            return 0, {name: d * self.heads(name) * dv for name in names}
        shared = self.u1.numel() if axis == "out" else self.heads(names[0]) * dv * second
        if form == "stacked":
            within = {self.place[name][0] for name in names}
            shared += first * sum(self.columns[i] for i in within)
            mixing = {i: self.columns[i] * (str(i) in self.u3) for i in within}
            return shared, {name: mixing[self.place[name][0]] + self.heads(name) * second * dv for name in names}
        if form == "joined":
            rest = {name: self.heads(name) * second * (d + dv * (axis == "out")) for name in names}
            return shared * (axis == "in"), rest
        if form == "merged":
            shared = shared if axis == "out" else 0
            last = 0 if axis == "out" else d * first
            return shared, {name: last + first * self.heads(name) * dv for name in names}
        rest = {}
        for name in names:
            i, h = self.place[name][0], self.heads(name)
            inner = self.columns[i] * (str(i) in self.u3) if self.absorbed else h * first * second
            outer = h * second * dv if axis == "out" else d * (self.columns[i] if self.absorbed else first)
            rest[name] = inner + outer
        return shared, rest

    def _cheapest(self, axis: str, trained: bool = False) -> Form:
        forms: list[Form] = ["factors"] if self.absorbed else ["factors", "merged"]
        if not trained:
            forms += ["dense"] if self.absorbed else ["joined", "dense"]
        if axis == "out" and self.u3 and not self.absorbed:
            forms.append("stacked")
        costs = {form: self.costs(axis, form) for form in forms}
        return min(forms, key=lambda form: costs[form][0] + sum(costs[form][1].values()))

    # --- computing ----------------------------------------------------------------------------------------------

    def project(self, name: str, x: Tensor) -> Tensor:
        """x times a matrix, (..., in) -> (..., out), without its bias."""
        axis = self.axes[name]
        form = (self.trained if torch.is_grad_enabled() else self.forms)[axis]
        if form == "dense":
            return F.linear(x, self._weight(name, lambda: self.matrix(name)))
        if form == "joined" and axis == "out":
            joined = self._weight(name, lambda: (self.u1 @ self.mixed(name)).transpose(1, 2).flatten(0, 1))
            return (F.linear(x, joined).unflatten(-1, (self.heads(name), -1)) @ self.u2.T).flatten(-2)
        if axis == "out":
            z = self._once(axis, name, x, lambda: self._first(x, form))
            if form == "merged":
                merged = self._weight(name, lambda: (self.mixed(name) @ self.u2.T).transpose(1, 2).flatten(0, 1))
                return F.linear(z, merged)
            return (self._inner(name, z, form) @ self.u2.T).flatten(-2)
        if form == "merged":
            merged = self._weight(name, lambda: (self.mixed(name) @ self.u2.T).transpose(0, 1).flatten(1))
            return F.linear(F.linear(x, merged), self.u1)
        y = self._once(axis, name, x, lambda: x.unflatten(-1, (self.heads(name), -1)) @ self.u2)
        if form == "joined":
            joined = self._weight(name, lambda: (self.u1 @ self.mixed(name)).transpose(0, 1).flatten(1))
            return F.linear(y.flatten(-2), joined)
        return self._outer(name, y)

    def _first(self, x: Tensor, form: Form) -> Tensor:
        """x U1; in the stacked form times all cores, (..., sum of columns)."""
        z = x @ self.u1
        if form != "stacked":
            return z
        cores = [core for i, core in self.cores.items() if int(i) in self._outward]
        return F.linear(z, self._weight("out", lambda: torch.cat([c.transpose(2, 3).flatten(0, 2) for c in cores])))

    @property
    def _outward(self) -> set[int]:
        """Numbers of the stacks with matrices of the axis "out"."""
        return {self.place[name][0] for name, axis in self.axes.items() if axis == "out"}

    def _inner(self, name: str, z: Tensor, form: Form) -> Tensor:
        """The result of `_first` -> x U1 M_mi of every head, (..., h, R2)."""
        h, second = self.heads(name), self.ranks[1]
        if not self.absorbed and form != "stacked":
            weight = self._weight(name, lambda: self.mixed(name).transpose(1, 2).flatten(0, 1))
            return F.linear(z, weight).unflatten(-1, (h, second))
        i, m = self.place[name]
        columns = [size * (self.absorbed or j in self._outward) for j, size in enumerate(self.columns)]
        part = z.split(columns, -1)[i].unflatten(-1, (-1, h, second))
        if str(i) not in self.u3:
            return part[..., m, :, :]
        first, *others = (weight * part[..., c, :, :] for c, weight in enumerate(self.u3[str(i)][m]))
        return sum(others, first)

    def _outer(self, name: str, y: Tensor) -> Tensor:
        """Heads times U2, (..., h, R2) -> the sum over heads of M_mi, times U1: (..., d)."""
        if not self.absorbed:
            weight = self._weight(name, lambda: self.mixed(name).transpose(0, 1).flatten(1))
            return F.linear(F.linear(y.flatten(-2), weight), self.u1)
        i, m = self.place[name]
        u1 = self.u1.split(self.columns, 1)[i]
        if str(i) not in self.u3:
            size = y.shape[-2] * y.shape[-1]
            return F.linear(y.flatten(-2), u1[:, m * size : (m + 1) * size])
        return F.linear((y.flatten(-2)[..., None, :] * self.u3[str(i)][m][:, None]).flatten(-2), u1)

    def matrix(self, name: str) -> Tensor:
        """W, (out, in)."""
        parts = self.parts(name)
        return parts.mT.flatten(0, 1) if self.axes[name] == "out" else parts.transpose(0, 1).flatten(1)

    def _weight(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A product of weights, cached without gradients until a weight changes."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            self._derived.clear()
            return make()
        state = (*self._state(), _autocast(self.u1.device.type))
        if name not in self._derived or self._derived[name][0] != state:
            self._derived[name] = state, make()
        product: Tensor = self._derived[name][1]
        return product

    def _state(self) -> tuple[Any, ...]:
        """A value that changes with every weight."""
        return tuple((_version(p), p.data_ptr(), p.dtype, p.device) for p in self.parameters())

    def train(self, mode: bool = True) -> HeadFactors:
        self._derived.clear()
        self._shared.clear()
        super().train(mode)
        return self

    def _once(self, axis: str, name: str, x: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """The product shared by the matrices of an axis: computed for the first, dropped after the last."""
        names = {other for other in self.place if self.axes[other] == axis}
        if len(names) == 1 or torch.compiler.is_compiling():
            return make()
        state = (_version(x), torch.is_grad_enabled(), _autocast(x.device.type), self._state())
        last_x, last_state, shared, waiting = self._shared.get(axis, (None, None, None, set()))
        if last_x is not x or last_state != state or name not in waiting:
            shared, waiting = make(), names
        waiting = waiting - {name}
        if waiting:
            self._shared[axis] = x, state, shared, waiting
        else:
            self._shared.pop(axis, None)
        result: Tensor = shared
        return result


class HeadProjection(Replacement):
    """One matrix of a layer, with its bias; `factors` is the path of the HeadFactors in the model."""

    kind = "tensorllm_projection"

    def __init__(self, factors: str, name: str, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.factors, self.name, self.in_features, self.out_features = factors, name, in_features, out_features
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self._owner: list[HeadFactors] = []  # in a list, so that it does not become a submodule

    def layout(self) -> dict[str, Any]:
        sizes = {"in_features": self.in_features, "out_features": self.out_features}
        return {"factors": self.factors, "name": self.name, **sizes, "bias": self.bias is not None}

    def bind(self, model: nn.Module, path: str) -> None:
        owner = model.get_submodule(self.factors)
        if not isinstance(owner, HeadFactors) or self.name not in owner.place:
            raise ValueError(f"{path}: {self.factors} has no factors of {self.name}")
        sizes, shape = (owner.heads(self.name) * owner.width, owner.dim), (self.out_features, self.in_features)
        if shape != (sizes if owner.axes[self.name] == "out" else sizes[::-1]):
            raise ValueError(f"{path}: its sizes {shape} differ from those of its factors")
        self._owner = [owner]

    @property
    def weight(self) -> Tensor:
        return self._owner[0].matrix(self.name)

    def forward(self, x: Tensor) -> Tensor:
        y = self._owner[0].project(self.name, x)
        return y if self.bias is None else y + self.bias

    def multiply_adds(self, tokens: int) -> int:
        (owner,) = self._owner
        axis = owner.axes[self.name]
        shared, rest = owner.costs(axis, owner.forms[axis])
        return tokens * (rest[self.name] + shared * (self.name == next(iter(rest))))

    def dense(self) -> tuple[Dense, float]:
        owner = copy.deepcopy(self._owner[0]).double()
        with torch.no_grad():
            weight = owner.matrix(self.name)
        return {"": (weight, self.bias)}, 0.0


def _autocast(kind: str) -> torch.dtype | None:
    """The dtype of autocast on a type of device; None: off or unavailable."""
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def _version(tensor: Tensor) -> int:
    """The number of in-place changes of a tensor; -1 in inference mode, which does not count them."""
    return -1 if tensor.is_inference() else tensor._version
