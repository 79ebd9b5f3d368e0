"""Partial Tucker decomposition by HOOI of stacks of matrices that share their row and their column subspace.

A block has the shape (n, h, I, J): n matrices of each of h heads. With one block of n = 4 this is the tensor W_all of
TensorLLM (eq. 14) with its modes in another order: U1 on I, U2 on J, U3 on n, and no factor on the heads. The blocks of
grouped-query attention (q and o; k and v) share U1 and U2, and each may have a U3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .slices import TINY

Watch = Callable[[int, int], None]  # sweeps done, sweeps at most
LEAST = 3  # sweeps before the tolerance applies, as in TensorLy
EXACT = 1e-6  # relative errors below this are those of the residual: a difference of squares loses all digits
LARGE = 512  # rows above which a sweep takes one step of subspace iteration instead of all eigenvectors


@dataclass(frozen=True)
class Tucker:
    """W[m, i] ~ U1 (sum_c U3[m, c] G[c, i]) U2.T for matrix m of head i of each block.

    Args:
        u1: U1, (I, R1), orthonormal columns.
        u2: U2, (J, R2), orthonormal columns.
        u3: U3 of each block, (n, R3), orthonormal columns, or None.
        cores: G of each block, (R3, h, R1, R2); (n, h, R1, R2) without a U3.
        history: relative errors, Frobenius norm, one of each sweep; they do not rise.
        errors: relative errors of each block's matrices after the last sweep, (n,).
    """

    u1: Tensor
    u2: Tensor
    u3: list[Tensor | None]
    cores: list[Tensor]
    history: list[float]
    errors: list[Tensor]

    @property
    def error(self) -> float:
        return self.history[-1]

    def dense(self) -> list[Tensor]:
        """The approximated blocks, (n, h, I, J) each."""
        return [self.u1 @ _stack(core, u3) @ self.u2.T for core, u3 in zip(self.cores, self.u3, strict=True)]


def tucker(
    blocks: Sequence[Tensor],
    ranks: tuple[int, int],
    stack_ranks: Sequence[int | None] | None = None,
    *,
    sweeps: int = 100,
    tolerance: float = 1e-5,
    seed: int = 0,
    watch: Watch | None = None,
) -> Tucker:
    """Higher-order orthogonal iteration, in float64, from the singular vectors of the unfoldings.

    Each sweep replaces U1, U2 and then every U3 by the leading eigenvectors of a Gram matrix of the tensor that the
    other factors project, so that the error does not rise. It ends in a local minimum.

    For a large U1 the eigenvectors cost most of a sweep, and the next sweep changes the matrix again. Instead, one step
    of subspace iteration continues from the last U1, at first from eigenvectors in float32. The error does not rise
    either, because the captured energy tr(U1.T G U1) of a positive semidefinite G never falls in such a step. When the
    steps change the error by less than the tolerance, sweeps with all eigenvectors follow until these do.

    Args:
        blocks: (n, h, I, J) each, of any floating dtype, with equal I and J.
        ranks: R1 (1 to I) and R2 (1 to J). Columns of U1 beyond the rank of its unfolding (R1 > h R2 R3) are random
            from `seed`.
        stack_ranks: R3 of each block, 1 to n; None: no factor on that mode.
        tolerance: change of the relative error at which the sweeps end, from the third one on; 0: all sweeps.

    Raises:
        ValueError: a rank out of bounds, or values that are not finite.
    """
    blocks = [block.detach().double() for block in blocks]
    stacks = [None] * len(blocks) if stack_ranks is None else list(stack_ranks)
    _check(blocks, ranks, stacks)
    identities = [
        torch.eye(rank).to(blocks[0]) if rank == len(block) else None
        for rank, block in zip(stacks, blocks, strict=True)
    ]
    stacks = [rank if u3 is None else None for rank, u3 in zip(stacks, identities, strict=True)]  # a full U3 is I
    generator = torch.Generator().manual_seed(seed)
    square = sum(float(block.square().sum()) for block in blocks)
    history: list[float] = []
    exact = False
    u1: Tensor | None = None
    u2 = _leading(sum((_columns(block) for block in blocks), torch.zeros(()).to(blocks[0])), ranks[1])
    u3 = [None if rank is None else _leading(_stacked(block), rank) for rank, block in zip(stacks, blocks, strict=True)]
    for sweep in range(max(sweeps, 1)):  # two products with the full tensor in each: by U2, then by the new U1
        narrow = [_unstack(block @ u2, u) for block, u in zip(blocks, u3, strict=True)]
        rows = [part.movedim(2, 0).flatten(1) for part in narrow]
        large = len(rows[0]) > LARGE and 2 * ranks[0] <= len(rows[0]) <= sum(part.shape[1] for part in rows)
        u1 = _step(rows, ranks[0], u1) if large and not exact else _subspace(rows, ranks[0], generator)
        low = [_left(u1, block) for block in blocks]  # (n, h, R1, J)
        mixed = [_unstack(part, u) for part, u in zip(low, u3, strict=True)]
        u2 = _subspace([part.flatten(0, 2).T for part in mixed], ranks[1], generator)
        narrow = [part @ u2 for part in low]  # (n, h, R1, R2)
        u3 = [
            None if stack is None else _subspace([core.flatten(1)], stack, generator)
            for core, stack in zip(narrow, stacks, strict=True)
        ]
        cores = [_unstack(core, u) for core, u in zip(narrow, u3, strict=True)]
        lost = square - sum(float(core.square().sum()) for core in cores)
        history.append((max(lost, 0.0) / max(square, TINY)) ** 0.5)
        if watch is not None:
            watch(sweep + 1, sweeps)
        if sweep + 1 >= LEAST and history[-2] - history[-1] < tolerance:
            if exact or not large:
                break
            exact = True  # single steps change little before they converge: eigenvectors finish
    assert u1 is not None
    result = _with_errors(blocks, narrow, Tucker(u1, u2, u3, cores, history, []))
    return replace(result, u3=[u if i is None else i for i, u in zip(identities, u3, strict=True)])


def truncation_errors(blocks: Sequence[Tensor], stack_ranks: Sequence[int | None] | None = None) -> Tensor:
    """The relative squared error of every pair of ranks, (I + 1, J + 1), from one decomposition.

    Entry (R1, R2) is that of the leading singular vectors of the unfoldings, where HOOI starts.

    Args:
        blocks: (n, h, I, J) each.
        stack_ranks: R3 of each block; None: no factor on that mode.
    """
    wide = [block.detach().double() for block in blocks]
    square = sum(float(block.square().sum()) for block in wide)
    stacks = [None] * len(wide) if stack_ranks is None else stack_ranks
    wide = [
        block if stack is None else _unstack(block, _leading(_stacked(block), stack))
        for block, stack in zip(wide, stacks, strict=True)
    ]
    u1 = torch.linalg.eigh(sum(_rows(block) for block in wide))[1].flip(-1)
    u2 = torch.linalg.eigh(sum(_columns(block) for block in wide))[1].flip(-1)
    energy = sum((u1.T @ block @ u2).square().sum((0, 1)) for block in wide)
    assert isinstance(energy, Tensor)
    captured = torch.nn.functional.pad(energy.cumsum(0).cumsum(1), (1, 0, 1, 0))
    return (1 - captured / max(square, TINY)).clamp_min(0)


def _check(blocks: Sequence[Tensor], ranks: tuple[int, int], stacks: Sequence[int | None]) -> None:
    for name, rank, most in zip(("R1", "R2"), ranks, blocks[0].shape[2:], strict=True):
        if not 1 <= rank <= most:
            raise ValueError(f"{name}={rank}: expected 1 to {most}")
    for stack, block in zip(stacks, blocks, strict=True):
        if stack is not None and not 1 <= stack <= len(block):
            raise ValueError(f"R3={stack}: expected 1 to {len(block)}")
    if not all(block.sum().isfinite() for block in blocks):  # in float64 finite values have a finite sum
        raise ValueError("the tensor has values that are not numbers or not finite")


def _with_errors(blocks: Sequence[Tensor], narrow: Sequence[Tensor], result: Tucker) -> Tucker:
    """Add the relative error of each matrix; `narrow`: the blocks between U1 and U2, (n, h, R1, R2)."""
    squares = [block.square().sum((1, 2, 3)) for block in blocks]
    history = result.history
    if result.error < EXACT:
        losses = [
            torch.stack([_residual(block[m], result, b, m) for m in range(len(block))])
            for b, block in enumerate(blocks)
        ]
        square = sum(float(part.sum()) for part in squares)
        last = (sum(float(lost.sum()) for lost in losses) / max(square, TINY)) ** 0.5
        history = [*(max(error, last) for error in history[:-1]), last]
    else:  # of orthonormal factors: the part outside both subspaces, and the change by U3 inside
        losses = []
        for total, core, low_core, u in zip(squares, narrow, result.cores, result.u3, strict=True):
            inside = (core - _stack(low_core, u)).square().sum((1, 2, 3))
            losses.append((total - core.square().sum((1, 2, 3)) + inside).clamp_min(0))
    errors = [(lost / total.clamp_min(TINY)).sqrt() for lost, total in zip(losses, squares, strict=True)]
    return replace(result, history=history, errors=errors)


def _residual(matrix: Tensor, decomposition: Tucker, block: int, m: int) -> Tensor:
    """|W[m] - its approximation|^2, head by head, so that no second tensor of the full size is formed."""
    core, u3 = decomposition.cores[block], decomposition.u3[block]
    mixed = core[m] if u3 is None else torch.tensordot(u3[m], core, 1)
    lost = matrix.new_zeros(())
    for head, part in zip(matrix, mixed, strict=True):
        lost += (head - decomposition.u1 @ part @ decomposition.u2.T).square().sum()
    return lost


def _left(u1: Tensor, block: Tensor) -> Tensor:
    """U1.T W[m, i] of every matrix: (n, h, R1, J)."""
    flat = block.flatten(0, 1)
    return torch.bmm(u1.T.expand(len(flat), -1, -1), flat).unflatten(0, block.shape[:2])


def _unstack(block: Tensor, u3: Tensor | None) -> Tensor:
    """The block times U3.T on its first mode: (R3, ...)."""
    return block if u3 is None else (u3.T @ block.flatten(1)).unflatten(1, block.shape[1:])


def _stack(core: Tensor, u3: Tensor | None) -> Tensor:
    """The core times U3 on its first mode: (n, ...)."""
    return core if u3 is None else (u3 @ core.flatten(1)).unflatten(1, core.shape[1:])


def _rows(block: Tensor) -> Tensor:
    """The Gram matrix of the unfolding on I."""
    return torch.einsum("nhij,nhkj->ik", block, block)


def _columns(block: Tensor) -> Tensor:
    """The Gram matrix of the unfolding on J."""
    flat = block.reshape(-1, block.shape[3])
    return flat.T @ flat


def _stacked(block: Tensor) -> Tensor:
    """The Gram matrix of the unfolding on n."""
    flat = block.reshape(len(block), -1)
    return flat @ flat.T


def _leading(gram: Tensor, rank: int) -> Tensor:
    """Eigenvectors of the largest eigenvalues, the largest first."""
    return torch.linalg.eigh(gram)[1].flip(-1)[:, :rank].contiguous()


def _step(unfoldings: Sequence[Tensor], rank: int, near: Tensor | None) -> Tensor:
    """One step of subspace iteration towards the leading left singular vectors of concatenated unfoldings.

    near: the start, orthonormal (I, rank); None: the eigenvectors of the Gram matrix in float32.
    """
    if near is None:
        near = _leading(sum((half @ half.T for half in map(Tensor.float, unfoldings)), torch.zeros(())), rank)
        near = near.to(unfoldings[0])
    moved = torch.zeros_like(near)
    for part in unfoldings:
        moved += part @ (part.T @ near)
    return torch.linalg.qr(moved)[0]


def _subspace(unfoldings: Sequence[Tensor], rank: int, generator: torch.Generator) -> Tensor:
    """The leading left singular vectors of concatenated unfoldings, (I, rank), from the Gram matrix.

    With fewer columns than rows, from a QR decomposition and a small SVD, which is more exact; columns beyond the rank
    are random, and orthogonal to the others.
    """
    rows, columns = len(unfoldings[0]), sum(part.shape[1] for part in unfoldings)
    if columns >= rows:
        gram = unfoldings[0] @ unfoldings[0].T
        for part in unfoldings[1:]:
            gram += part @ part.T
        return _leading(gram, rank)
    q, r = torch.linalg.qr(torch.cat(list(unfoldings), 1))
    basis = q @ torch.linalg.svd(r)[0][:, :rank]
    if columns >= rank:
        return basis
    noise = torch.randn(rows, rank - columns, generator=generator, dtype=torch.float64).to(basis)
    return torch.cat([basis, torch.linalg.qr(torch.cat([basis, noise], 1))[0][:, columns:]], 1)
