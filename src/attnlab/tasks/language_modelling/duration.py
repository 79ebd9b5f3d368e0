"""An estimate of how long a conversion and its scores take, made before they begin."""

import time

import torch

from attnlab.models import Decoder

PASSES = 3  # of the calibration texts: statistics, outputs of the original, inputs of the next layer
SOLVED = 100  # multiply-adds of a layer's decompositions, in cubes of the width
REACHED = 0.7  # of a matrix product's speed, by a model that is scored
ROWS, TRIES = 2048, 5  # of the matrix product that is timed


def expected(model: Decoder, converted: int, scored: int, window: int, device: torch.device) -> str:
    """A line with the minutes that a conversion on the CPU and the scores before and after it are likely to take.

    Args:
        converted: tokens of calibration.
        scored: tokens that each of the two models reads.
        window: tokens of a text.
        device: where models are scored.
    """
    token, width = model.multiply_adds(window // 2), model.embedding.embedding_dim
    solved = len(model.blocks) * SOLVED * width**3
    rate = multiply_adds_per_second(width, torch.device("cpu"))
    scoring = rate if device.type == "cpu" else multiply_adds_per_second(width, device)
    seconds = (PASSES * converted * token + solved) / rate + 2 * scored * token / (REACHED * scoring)
    return (
        f"expected: about {max(1, round(seconds / 60))} min, an estimate from a matrix product of "
        f"{2 * rate / 1e9:.0f} GFLOP/s on this machine: {converted:,} tokens of calibration, "
        f"{scored:,} scored by each model"
    )


def multiply_adds_per_second(width: int, device: torch.device) -> float:
    """The speed of a float32 matrix product with a square weight, the best of some tries."""
    x, weight = torch.ones(ROWS, width, device=device), torch.ones(width, width, device=device)
    seconds = []
    for _ in range(1 + TRIES):  # the first one warms up
        began = time.perf_counter()
        float((x @ weight)[0, 0])  # waits for a GPU
        seconds.append(time.perf_counter() - began)
    return ROWS * width * width / min(seconds)
