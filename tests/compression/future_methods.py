"""Three small methods that use the interface as LASER, TensorLLM and TRAWL will: one matrix of an MLP; q, k, v and o of
all heads of a layer in one module; matrices stacked across layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.compression.methods.base import Change, Method, Unit, Watch, settings_of
from attnlab.compression.modules.base import Dense, Replacement
from attnlab.errors import ConfigError
from attnlab.pretrained import ATTENTION, Layer, Projection


def subspace(unfolded: Tensor, rank: int) -> Tensor:
    """The leading left singular vectors, in float64."""
    return torch.linalg.svd(unfolded.double(), full_matrices=False)[0][:, :rank]


class OneMatrix(Method):
    """The best approximation of one MLP matrix, written back dense. layer: may count from the end."""

    def __init__(self, layer: int, name: str, rank: int) -> None:
        self.layer, self.name, self.rank = layer, name, rank

    def units(self, model: nn.Module, layers: Sequence[Layer]) -> list[Unit]:
        layer = layers[self.layer]
        matrix = layer.projections[self.name]
        if self.rank > min(matrix.shape):
            raise ConfigError(f"rank={self.rank}: {matrix.path} takes 1 to {min(matrix.shape)}")

        def fit(watch: Watch) -> Change:
            weight = matrix.read(model).double()
            basis = subspace(weight, self.rank)
            new = basis @ (basis.T @ weight)
            return Change(projections={(layer.path, self.name): new}, report={"error": float((new - weight).norm())})

        return [Unit(matrix.path, [matrix.path], settings_of(self), fit, lambda: Change())]


class Factors(Replacement):
    """U1 (d, R1) and U2 (dv, R2), shared by every head slice, and a core (R1, R2) for each of them."""

    kind = "test-factors"

    def __init__(self, dim: int, width: int, ranks: Sequence[int], slices: Sequence[int]) -> None:
        super().__init__()
        self.ranks, self.slices = list(ranks), list(slices)  # number of heads of q, k, v, o
        self.u1, self.u2 = nn.Parameter(torch.zeros(dim, ranks[0])), nn.Parameter(torch.zeros(width, ranks[1]))
        self.cores = nn.Parameter(torch.zeros(sum(slices), *ranks))

    def layout(self) -> dict[str, Any]:
        return {"dim": len(self.u1), "width": len(self.u2), "ranks": self.ranks, "slices": self.slices}

    def multiply_adds(self, tokens: int) -> int:
        return 0  # counted where they are used

    def dense(self) -> tuple[Dense, float]:
        return {}, 0.0

    def of(self, name: str) -> Tensor:
        """The cores of a projection."""
        return self.cores.split(self.slices)[ATTENTION.index(name)]


class View(Replacement):
    """One projection of a layer whose factors lie in another module; only the bias is its own."""

    kind = "test-view"

    def __init__(self, factors: str, name: str, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.path, self.name = factors, name
        self.in_features, self.out_features = in_features, out_features
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self._factors: list[Factors] = []  # in a list, so that it is not a submodule here too

    def layout(self) -> dict[str, Any]:
        sizes = {"in_features": self.in_features, "out_features": self.out_features}
        return {"factors": self.path, "name": self.name, **sizes, "bias": self.bias is not None}

    def bind(self, model: nn.Module, path: str) -> None:
        result = model.get_submodule(self.path)
        assert isinstance(result, Factors)
        self._factors = [result]

    def forward(self, x: Tensor) -> Tensor:
        (factors,) = self._factors
        cores = factors.of(self.name)
        if self.name == "o":
            heads = x.unflatten(-1, (len(cores), -1)) @ factors.u2
            y = torch.einsum("...hs,hrs->...r", heads, cores) @ factors.u1.T
        else:
            y = (torch.einsum("...r,hrs->...hs", x @ factors.u1, cores) @ factors.u2.T).flatten(-2)
        return y if self.bias is None else y + self.bias

    def multiply_adds(self, tokens: int) -> int:
        (factors,) = self._factors
        (dim, first), (width, second) = factors.u1.shape, factors.u2.shape
        return tokens * (dim * first + len(factors.of(self.name)) * second * (first + width))

    def dense(self) -> tuple[Dense, float]:
        (factors,) = self._factors
        parts = factors.u1.double() @ factors.of(self.name).double() @ factors.u2.double().T  # (heads, d, dv)
        place = Projection("", (self.out_features, self.in_features), "in" if self.name == "o" else "out", len(parts))
        return {"": (place.join(parts), self.bias)}, 0.0


class AllHeads(Method):
    """Q, K, V and O of all heads of chosen layers as one d x dv x heads tensor, Tucker on its first two modes."""

    def __init__(self, layers: Sequence[int], ranks: Sequence[int]) -> None:
        self.layers, self.ranks = list(layers), list(ranks)

    def units(self, model: nn.Module, layers: Sequence[Layer]) -> list[Unit]:
        return [self._unit(model, layers[i]) for i in self.layers]

    def _unit(self, model: nn.Module, layer: Layer) -> Unit:
        if reason := layer.refusals.get("attention"):
            raise ConfigError(reason)
        places = {name: layer.projections[name] for name in ATTENTION}
        factors = f"{layer.attention}.factors"

        def outline() -> Change:
            q = places["q"]
            owner = Factors(q.shape[1], q.width, self.ranks, [place.heads for place in places.values()])
            views = {
                (layer.path, name): View(factors, name, place.shape[1], place.shape[0], place.bias)
                for name, place in places.items()
            }
            return Change({factors: owner}, views)

        def fit(watch: Watch) -> Change:
            change = outline()
            tensor = torch.cat([place.split(place.read(model)) for place in places.values()]).double()  # (n, d, dv)
            u1 = subspace(tensor.transpose(0, 1).flatten(1), self.ranks[0])
            u2 = subspace(tensor.movedim(2, 0).flatten(1), self.ranks[1])
            cores = u1.T @ tensor @ u2
            change.modules[factors].double().load_state_dict({"u1": u1, "u2": u2, "cores": cores})
            for name, place in places.items():
                view = change.projections[layer.path, name]
                assert isinstance(view, View)
                if (bias := place.read_bias(model)) is not None:
                    view.load_state_dict({"bias": bias})
            error = float((tensor - u1 @ cores @ u2.T).norm() / tensor.norm())
            return Change(change.modules, change.projections, {"ranks": self.ranks, "error": error})

        paths = sorted({place.path for place in places.values()})
        return Unit(layer.attention or "", paths, settings_of(self, "layers"), fit, outline)


class Stacked(Method):
    """One matrix of the MLP of every layer, stacked; the stack's first two modes are projected, and written back."""

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name, self.ranks = name, list(ranks)

    def units(self, model: nn.Module, layers: Sequence[Layer]) -> list[Unit]:
        matrices = {layer.path: layer.projections[self.name] for layer in layers}

        def fit(watch: Watch) -> Change:
            stack = torch.stack([matrix.read(model) for matrix in matrices.values()]).double()  # (layers, out, in)
            over = subspace(stack.flatten(1), self.ranks[0])
            out = subspace(stack.transpose(0, 1).flatten(1), self.ranks[1])
            new = torch.einsum("lk,mk,moi->loi", over, over, out @ (out.T @ stack))
            changed = {(path, self.name): weight for path, weight in zip(matrices, new, strict=True)}
            return Change(projections=changed, report={"error": float((new - stack).norm() / stack.norm())})

        paths = [matrix.path for matrix in matrices.values()]
        return [Unit(f"{self.name} of {len(paths)} layers", paths, settings_of(self), fit, lambda: Change())]
