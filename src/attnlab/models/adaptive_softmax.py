"""Full and adaptive softmax layers that share their weights with the input embeddings."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TiedSoftmax(nn.Module):
    """Softmax over a linear layer with bias, (V, d), whose weights are also the input embeddings."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d_model, vocab_size)
        _begin(self.linear, d_model)

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, d)."""
        return F.embedding(tokens, self.linear.weight)

    def log_prob(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, V), float32 or wider."""
        return self.linear(x).log_softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))

    def nll(self, x: Tensor, targets: Tensor) -> Tensor:
        """(..., d), (...) -> (...), in nats."""
        return -self.log_prob(x).gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of the embedding and the distribution of one position."""
        return self.linear.weight.numel()


class Cluster(nn.Module):
    """Logits of a cluster's words, (B, d) -> (B, words).

    Args:
        width: width of the word vectors; d unless `project`.
        project: whether a linear layer (width, d) without bias comes first.
    """

    def __init__(self, d_model: int, width: int, words: int, project: bool) -> None:
        super().__init__()
        self.projection = nn.Linear(d_model, width, bias=False) if project else None
        self.linear = nn.Linear(width, words)
        _begin(self.linear, d_model)
        if self.projection is not None:
            nn.init.normal_(self.projection.weight, std=d_model**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x if self.projection is None else self.projection(x))


class AdaptiveSoftmax(nn.AdaptiveLogSoftmaxWithLoss):
    """Words in clusters, the most frequent first: cluster i has width d / div_value^i (Grave et al., 2017).

    As in Transformer-XL, every cluster has a bias, and a projection from d to its width unless `div_value` is 1.
    Words are embedded with the same weights (Baevski and Auli, 2019).

    Args:
        vocab_size: number of words, sorted by frequency.
        cutoffs: first words of the second and later clusters, ascending, each below `vocab_size`.
        div_value: ratio of the widths of consecutive clusters.
        tie_projections: whether embeddings share the projections of the output.

    ValueError: d is less than `div_value` to the number of cutoffs.
    """

    def __init__(
        self, vocab_size: int, d_model: int, cutoffs: list[int], div_value: int = 1, *, tie_projections: bool = True
    ) -> None:
        if div_value < 1 or d_model < div_value ** len(cutoffs):
            raise ValueError(f"d_model={d_model} cannot be divided {len(cutoffs)} times by div_value={div_value}")
        super().__init__(d_model, vocab_size, cutoffs, float(div_value))
        starts = [0, *self.cutoffs[:-1]]
        clusters = [
            Cluster(d_model, d_model // div_value**i, end - start if i else self.head_size, div_value > 1)
            for i, (start, end) in enumerate(zip(starts, self.cutoffs, strict=True))
        ]
        self.head = clusters[0]  # type: ignore[assignment]
        self.tail = nn.ModuleList(clusters[1:])
        self.embed_projections = nn.ModuleList()
        if div_value > 1 and not tie_projections:
            for cluster in clusters:
                self.embed_projections.append(nn.Linear(cluster.linear.in_features, d_model, bias=False))
            for linear in self.embed_projections:
                nn.init.normal_(linear.get_parameter("weight"), std=d_model**-0.5)

    def _embeddings(self) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """First word, weights (words, width) and projection (d, width) of each cluster."""
        starts, ends = [0, *self.cutoffs[:-1]], self.cutoffs
        clusters = [module for module in (self.head, *self.tail) if isinstance(module, Cluster)]
        for i, (start, end, cluster) in enumerate(zip(starts, ends, clusters, strict=True)):
            projection = None if cluster.projection is None else cluster.projection.weight.mT
            if self.embed_projections:
                projection = self.embed_projections[i].get_parameter("weight")
            yield start, cluster.linear.weight[: end - start], projection  # further rows of the head are clusters

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, d). Every cluster embeds every token, so that shapes do not depend on the tokens."""
        x: Tensor | float = 0.0
        for start, weight, projection in self._embeddings():
            place = tokens - start
            inside = (place >= 0) & (place < len(weight))
            embedded = F.embedding(place.clamp(0, len(weight) - 1), weight)
            if projection is not None:
                embedded = F.linear(embedded, projection)
            x = x + embedded * inside.unsqueeze(-1)
        assert isinstance(x, Tensor)
        return x

    def log_prob(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, V)."""
        return super().log_prob(x.flatten(0, -2)).unflatten(0, x.shape[:-1])

    def nll(self, x: Tensor, targets: Tensor) -> Tensor:
        """(..., d), (...) -> (...), in nats. Only the clusters of the targets are computed."""
        return -self(x.flatten(0, -2), targets.flatten()).output.view_as(targets)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of the embedding, in every cluster, and the distribution of one position."""
        projections = sum(p.numel() for _, _, p in self._embeddings() if p is not None)
        matrices = [
            module.weight
            for half in (self.head, self.tail)
            for module in half.modules()
            if isinstance(module, nn.Linear)
        ]
        return projections + sum(matrix.numel() for matrix in matrices)


def _begin(linear: nn.Linear, d_model: int) -> None:
    """Initialise embeddings of variance 0.02^2 after projection, as in Transformer-XL."""
    nn.init.normal_(linear.weight, std=0.02 * (d_model / linear.in_features) ** 0.5)
    nn.init.zeros_(linear.bias)
