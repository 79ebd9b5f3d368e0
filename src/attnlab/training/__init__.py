"""Training: the LightningModule base, schedules, checkpoints."""

from attnlab.training.schedule import InverseSquareRoot, WarmupCosine

__all__ = ["InverseSquareRoot", "WarmupCosine"]
