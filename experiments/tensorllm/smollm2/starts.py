"""Write starts.csv: what several starts of HOOI and of CP give on the weights of a real model, and their times.

python experiments/tensorllm/smollm2/starts.py MODEL

attnlab starts once, from singular vectors. Here HOOI is written again, plainly, so that it can start from random
subspaces too. From singular vectors it has to end at attnlab's error.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from attnlab.compression.decompositions.cp import cp_als
from attnlab.compression.decompositions.slices import Slices
from attnlab.compression.decompositions.tucker import tucker
from attnlab.compression.methods.trawl import TRAWL
from attnlab.pretrained import family_of, huggingface

FILE = Path(__file__).with_name("starts.csv")
LAYERS = (5, 17, 29)
HOOI = {"ranks": (288, 32), "starts": 8}
CP = {"rank": 29, "starts": 4}


def leading(unfolding: Tensor, rank: int) -> Tensor:
    """The leading left singular vectors of a matrix."""
    return torch.linalg.eigh(unfolding @ unfolding.T)[1].flip(-1)[:, :rank]


def hooi(heads: Tensor, ranks: Sequence[int], u2: Tensor) -> float:
    """The relative error of heads (n, I, J) ~ U1 G U2.T after alternating, from a start of U2."""
    square, history = float(heads.square().sum()), [float("inf")]
    for sweep in range(100):
        u1 = leading((heads @ u2).movedim(1, 0).flatten(1), ranks[0])
        low = u1.T @ heads
        u2 = leading(low.flatten(0, 1).T, ranks[1])
        history.append(max(1 - float((low @ u2).square().sum()) / square, 0.0) ** 0.5)
        if sweep >= 2 and history[-2] - history[-1] < 1e-5:
            break
    return history[-1]


def rows(name: str) -> list[dict[str, object]]:
    """A row for each layer, method and start."""
    model = huggingface.load(name)
    layers = family_of(model).layers(model)
    results: list[dict[str, object]] = []

    def add(layer: int, method: str, start: str, began: float, error: float) -> None:
        row = {"Layer": layer, "Method": method, "Start": start, "Error": error}
        results.append(row | {"CPU seconds": time.process_time() - began})
        print(results[-1], flush=True)

    for number in LAYERS:
        parts = [layers[number].projections[name] for name in ("q", "o", "k", "v")]
        stacks = [part.split(part.read(model)).double() for part in parts]
        began = time.process_time()
        ours = tucker([torch.stack(stacks[:2]), torch.stack(stacks[2:])], HOOI["ranks"]).error
        add(number, "HOOI", "attnlab", began, ours)
        heads = torch.cat(stacks)
        began = time.process_time()
        plain = hooi(heads, HOOI["ranks"], leading(heads.flatten(0, 1).T, HOOI["ranks"][1]))
        add(number, "HOOI", "singular vectors", began, plain)
        assert abs(plain - ours) < 1e-4, (plain, ours)
        for seed in range(1, HOOI["starts"] + 1):
            began, noise = time.process_time(), torch.Generator().manual_seed(seed)
            u2 = torch.linalg.qr(torch.randn(heads.shape[2], HOOI["ranks"][1], generator=noise).double())[0]
            add(number, "HOOI", f"random {seed}", began, hooi(heads, HOOI["ranks"], u2))
        (stack,) = TRAWL(mode=5, layers=[number]).stacks(model, layers)
        slices = Slices.of(stack.read(model).movedim(0, -1))
        for seed in range(CP["starts"] + 1):
            began = time.process_time()
            error = cp_als(slices, CP["rank"], start="random" if seed else "svd", sweeps=100, seed=seed).error
            add(number, "CP", f"random {seed}" if seed else "attnlab", began, error)
    return results


if __name__ == "__main__":
    pd.DataFrame(rows(sys.argv[1])).round({"Error": 6, "CPU seconds": 2}).to_csv(FILE, index=False, lineterminator="\n")
