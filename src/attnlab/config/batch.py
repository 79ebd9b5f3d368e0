"""The global batch: `task.train.batch` is what one update sees on all devices together.

The batches that each process accumulates follow from the number of processes and from the largest batch
(`task.data.batch_size`, `max_frames`).
"""

from dataclasses import dataclass
from math import gcd

from omegaconf import DictConfig, OmegaConf

from attnlab.errors import ConfigError


@dataclass(frozen=True)
class Share:
    """The part of each process in an update."""

    size: int  # windows or images of a batch
    accumulate: int  # batches of each process in an update


@dataclass(frozen=True)
class FrameShare:
    """The part of each process in an update whose sentences are chosen by length."""

    buckets: int  # groups of sentences of similar length in an update
    parts: int  # batches that each bucket is divided into
    accumulate: int  # batches of each process in an update


def share_equally(unit: str, number: int, limit: int, processes: int, window: int = 1, paired: bool = False) -> Share:
    """Share an update of windows, images or sequences of one length. ConfigError names the nearest values that can be.

    Args:
        unit: the key in `task.train.batch`, tokens, images or sequences.
        number: units of an update on all processes, a multiple of `window`, the tokens of a training window.
        limit: the most windows, images or sequences of a batch.
        paired: images are mixed in pairs (Mixup, CutMix), so that each batch of a divided update is even.
    """
    key = f"task.train.batch.{unit}"
    check_tokens(key, number, window)
    items, pair = number // window, 2 if paired else 1
    if processes == 1 and items <= limit:
        return Share(items, 1)
    if items % (processes * pair):
        near = " or ".join(str(value * window) for value in _multiples(items, processes * pair))
        counts = [] if items % pair else _divisors_beside(items // pair, processes)
        devices = f", or hardware.devices={' or '.join(map(str, counts))}" if counts else ""
        how = "equally in pairs (task.mixup)" if paired else "equally"
        raise ConfigError(
            f"{key}={number} cannot be shared {how} by {counted(processes, 'process')}; nearest: {near}{devices}"
        )
    if limit < pair:
        raise ConfigError(f"task.data.batch_size={limit}: expected at least 2, as images are mixed in pairs")
    part = items // processes
    size = max(size for size in range(pair, min(part, limit) + 1, pair) if part % size == 0)
    return Share(size, part // size)


def check_tokens(key: str, tokens: int, window: int) -> None:
    """Refuse an update of a language model that is not a multiple of the window. ConfigError names the nearest."""
    if tokens % window:
        near = " or ".join(map(str, _multiples(tokens, window)))
        raise ConfigError(f"{key}={tokens}: expected a multiple of task.data.window={window}; nearest: {near}")


def share_frames(frames: int, bucket: int, limit: int, longest: int, processes: int, split: bool = True) -> FrameShare:
    """Share an update whose sentences are chosen by length; frames include padding. ConfigError: it cannot be shared.

    Args:
        frames: of an update on all processes, a multiple of `bucket`.
        bucket: frames of a group of sentences of similar length.
        limit: the most frames of a batch.
        longest: frames of the longest sentence.
        split: a bucket may be divided into several batches. Without it BatchNorm's statistics are those of a bucket;
            processes that divide one bucket sum the statistics.
    """
    if frames % bucket:
        near, of = " or ".join(map(str, _multiples(frames, bucket))), f"task.train.batch.bucket={bucket}"
        raise ConfigError(f"task.train.batch.frames={frames}: expected a multiple of {of}; nearest: {near}")
    buckets = frames // bucket
    if not split:
        return _share_buckets(buckets, bucket, limit, processes)
    if limit <= min(longest, bucket - 1):
        raise ConfigError(
            f"task.data.max_frames={limit}: to divide buckets of {bucket} frames, expected more than the longest "
            f"sentence accepted ({longest} frames)"
        )
    # the last sentence of a part must fit too
    least = 1 if limit >= bucket else -(-(bucket - longest) // (limit - longest))
    step = processes // gcd(buckets, processes)
    parts = -(-least // step) * step
    return FrameShare(buckets, parts, buckets * parts // processes)


def _share_buckets(buckets: int, bucket: int, limit: int, processes: int) -> FrameShare:
    """Share buckets that are not divided into several batches."""
    undivided = "which BatchNorm does not allow to divide (task.train.batch.split=false)"
    if buckets > 1 and buckets % processes:
        near = " or ".join(map(str, _divisors_beside(buckets, processes)))
        raise ConfigError(
            f"task.train.batch: {processes} processes cannot share {buckets} buckets of {bucket} frames, {undivided}; "
            f"nearest: hardware.devices={near}"
        )
    if limit < bucket:
        raise ConfigError(f"task.data.max_frames={limit}: expected at least a bucket's {bucket} frames, {undivided}")
    return FrameShare(buckets, processes if buckets == 1 else 1, max(1, buckets // processes))


def check_batch(cfg: DictConfig, processes: int | None = None) -> None:
    """Refuse a global batch that the processes cannot share (ConfigError). None: those of `cfg.hardware`, if known."""
    processes = processes or configured_processes(cfg)
    batch, data = OmegaConf.select(cfg, "task.train.batch"), cfg.task.get("data")
    if processes is None or batch is None or cfg.mode not in ("train", "describe"):
        return
    if unit := next((unit for unit in ("tokens", "sequences", "images") if unit in batch), None):
        mixing = cfg.task.get("mixup") or {}
        paired = bool(mixing.get("mixup_alpha") or mixing.get("cutmix_alpha"))
        share_equally(unit, batch[unit], data.batch_size, processes, data.window if unit == "tokens" else 1, paired)
    else:
        if batch.bucket < data.min_input_frames:
            least = f"task.data.min_input_frames={data.min_input_frames}"
            raise ConfigError(f"task.train.batch.bucket={batch.bucket}: expected at least {least}")
        longest = max(data.max_input_frames, data.max_target_tokens)
        share_frames(batch.frames, batch.bucket, data.max_frames, longest, processes, batch.split)


def configured_processes(cfg: DictConfig) -> int | None:
    """The number of processes in `cfg.hardware`; None where it depends on the machine."""
    devices = cfg.hardware.devices
    count = len(devices) if OmegaConf.is_list(devices) else devices
    return count * int(cfg.hardware.num_nodes) if isinstance(count, int) and count > 0 else None


def counted(number: int, unit: str) -> str:
    """A number and what it counts, `unit` in the singular: "1 batch", "2 batches", "2 epochs"."""
    plural = unit + ("es" if unit.endswith(("s", "tch")) else "s")
    return f"{number} {unit if number == 1 else plural}"


def _multiples(value: int, step: int) -> list[int]:
    """The multiples of `step` beside `value`, none below `step`."""
    low = value // step * step
    return [low, low + step] if low else [step]


def _divisors_beside(value: int, near: int) -> list[int]:
    """The divisors of `value` next to `near` on either side, as far as there are any."""
    divisors = [n for n in range(1, value + 1) if value % n == 0]
    below, above = [n for n in divisors if n < near], [n for n in divisors if n > near]
    return [*below[-1:], *above[:1]]
