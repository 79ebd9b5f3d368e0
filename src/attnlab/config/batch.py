"""The global batch: how the processes of a run share what one update sees.

A recipe states in `task.train.batch` what one update sees on all devices together.  How many batches each process
accumulates follows from the number of processes and from the upper limit of a batch (`task.data.batch_size`,
`task.data.max_frames`).  The arithmetic needs no torch, so that a wrong setting is refused before anything is imported.
"""

from dataclasses import dataclass
from math import gcd

from omegaconf import DictConfig, OmegaConf

from attnlab.errors import ConfigError


@dataclass(frozen=True)
class Share:
    """What each process contributes to an update.

    Attributes:
        size: windows or images of a batch.
        accumulate: batches of each process in an update.
    """

    size: int
    accumulate: int


@dataclass(frozen=True)
class FrameShare:
    """What each process contributes to an update whose sentences are chosen by length.

    Attributes:
        buckets: groups of sentences of similar length in an update.
        parts: batches that each bucket is divided into.
        accumulate: batches of each process in an update.
    """

    buckets: int
    parts: int
    accumulate: int


def share_tokens(tokens: int, window: int, limit: int, processes: int) -> Share:
    """Share an update of a language model.

    Args:
        tokens: of an update, on all processes together; a multiple of `window`.
        window: tokens of a training window.
        limit: the largest number of windows in a batch; the largest divisor of a process's share that fits is taken.
        processes: the number of processes.

    Raises:
        ConfigError: the update cannot be shared equally; the message names the nearest values that can.
    """
    key = "task.train.batch.tokens"
    check_tokens(key, tokens, window)
    return _share(key, tokens // window, window, "windows", limit, processes, paired=False)


def check_tokens(key: str, tokens: int, window: int) -> None:
    """Refuse an update of a language model that is no whole number of windows.

    Args:
        key: that says how many tokens, for the error.
        tokens: of an update.
        window: tokens of a training window.

    Raises:
        ConfigError: the message names the nearest values that are multiples.
    """
    if tokens < 1 or tokens % window:
        near = " or ".join(map(str, _multiples(tokens, window)))
        raise ConfigError(f"{key}={tokens}: expected a multiple of task.data.window={window}; nearest: {near}")


def share_images(images: int, limit: int, processes: int, paired: bool = False) -> Share:
    """Share an update of an image classifier.

    Args:
        images: of an update, on all processes together.
        limit: the largest number of images in a batch; the largest divisor of a process's share that fits is taken.
        processes: the number of processes.
        paired: whether images are mixed in pairs (Mixup, CutMix): each batch of a divided update is then even.

    Raises:
        ConfigError: the update cannot be shared equally; the message names the nearest values that can.
    """
    key = "task.train.batch.images"
    if images < 1:
        raise ConfigError(f"{key}={images}: expected at least 1")
    return _share(key, images, 1, "images", limit, processes, paired)


def share_sequences(sequences: int, limit: int, processes: int) -> Share:
    """Share an update of sequences of one length.

    Args:
        sequences: of an update, on all processes together.
        limit: the largest number in a batch; the largest divisor of a process's share that fits is taken.
        processes: the number of processes.

    Raises:
        ConfigError: the update cannot be shared equally; the message names the nearest values that can.
    """
    key = "task.train.batch.sequences"
    if sequences < 1:
        raise ConfigError(f"{key}={sequences}: expected at least 1")
    return _share(key, sequences, 1, "sequences", limit, processes, paired=False)


def share_frames(frames: int, bucket: int, limit: int, longest: int, processes: int, split: bool = True) -> FrameShare:
    """Share an update whose sentences are chosen by length.

    Args:
        frames: input frames or pieces of an update, padding included, on all processes together; a multiple of
            `bucket`.
        bucket: frames of a group of sentences of similar length, padding included.
        limit: the largest number of frames in a batch, padding included.
        longest: frames of the longest sentence that training accepts.
        processes: the number of processes.
        split: whether a bucket may be divided into several batches.  False where the model has BatchNorm, whose
            statistics are those of a bucket.  An update of one bucket is then divided once, so that each process has
            a part of it at the same time, and BatchNorm's statistics are summed over the parts.

    Raises:
        ConfigError: the update cannot be shared equally, or no batch fits `limit`.
    """
    if frames < 1 or bucket < 1 or frames % bucket:
        near = " or ".join(map(str, _multiples(frames, max(bucket, 1))))
        raise ConfigError(
            f"task.train.batch.frames={frames}: expected a multiple of task.train.batch.bucket={bucket}; "
            f"nearest: {near}"
        )
    buckets, least = frames // bucket, 1
    if not split:
        if buckets > 1 and buckets % processes:
            near = " or ".join(map(str, _divisors_beside(buckets, processes)))
            raise ConfigError(
                f"task.train.batch: {processes} processes cannot share {counted(buckets, 'bucket')} of {bucket} "
                "frames, which BatchNorm does not allow to divide (task.train.batch.split=false); nearest: "
                f"hardware.devices={near}, or a smaller task.train.batch.bucket, which is another recipe"
            )
        if limit < bucket:
            raise ConfigError(
                f"task.data.max_frames={limit}: expected at least task.train.batch.bucket={bucket}, which BatchNorm "
                "does not allow to divide (task.train.batch.split=false)"
            )
        return FrameShare(buckets, processes if buckets == 1 else 1, max(1, buckets // processes))
    if limit < bucket:
        if limit <= longest:
            raise ConfigError(
                f"task.data.max_frames={limit}: to divide buckets of {bucket} frames, expected more than the longest "
                f"sentence accepted ({longest} frames)"
            )
        least = -(-(bucket - longest) // (limit - longest))  # so that a part's last sentence still fits
    step = processes // gcd(buckets, processes)
    parts = -(-least // step) * step
    return FrameShare(buckets, parts, buckets * parts // processes)


def check_batch(cfg: DictConfig, processes: int | None = None) -> None:
    """Refuse a global batch that the processes of a run cannot share.

    Args:
        cfg: the whole resolved configuration.
        processes: the number of processes; None: from `cfg.hardware`.  Nothing is checked where only the machine
            tells it (hardware.devices=auto).

    Raises:
        ConfigError: names the key, and the nearest values that can be shared.
    """
    processes = processes or configured_processes(cfg)
    batch, data = OmegaConf.select(cfg, "task.train.batch"), cfg.task.get("data")
    if processes is None or batch is None or cfg.mode not in ("train", "describe"):
        return
    if "tokens" in batch:
        share_tokens(batch.tokens, data.window, data.batch_size, processes)
    elif "sequences" in batch:
        share_sequences(batch.sequences, data.batch_size, processes)
    elif "images" in batch:
        mixing = cfg.task.mixup
        share_images(batch.images, data.batch_size, processes, bool(mixing.mixup_alpha or mixing.cutmix_alpha))
    else:
        if batch.bucket < data.min_input_frames:
            raise ConfigError(
                f"task.train.batch.bucket={batch.bucket}: expected at least task.data.min_input_frames="
                f"{data.min_input_frames}, the shortest input of training"
            )
        longest = max(data.max_input_frames, data.max_target_tokens)
        share_frames(batch.frames, batch.bucket, data.max_frames, longest, processes, batch.split)


def configured_processes(cfg: DictConfig) -> int | None:
    """The number of processes in `cfg.hardware`; None where it depends on the machine."""
    devices = cfg.hardware.devices
    if isinstance(devices, int) and devices > 0:
        return devices * int(cfg.hardware.num_nodes)
    if OmegaConf.is_list(devices):
        return len(devices) * int(cfg.hardware.num_nodes)
    return None


def _share(key: str, items: int, each: int, unit: str, limit: int, processes: int, paired: bool) -> Share:
    if limit < 1:
        raise ConfigError(f"task.data.batch_size={limit}: expected at least 1")
    if processes == 1 and items <= limit:
        return Share(items, 1)
    step = processes * (2 if paired else 1)
    if items % step:
        near = " or ".join(str(value * each) for value in _multiples(items, step))
        pairs = " in pairs (task.mixup)" if paired else ""
        whole = items // 2 if paired else items
        counts = _divisors_beside(whole, processes) if not (paired and items % 2) else []
        devices = f", or hardware.devices={' or '.join(map(str, counts))}" if counts else ""
        what = f"{items * each} ({items} {unit})" if each > 1 else str(items)
        raise ConfigError(
            f"{key}={what} cannot be shared equally{pairs} by {counted(processes, 'process')}; nearest: {near}{devices}"
        )
    mine, unit_size = items // processes, 2 if paired else 1
    if limit < unit_size:
        raise ConfigError(f"task.data.batch_size={limit}: expected at least 2, as images are mixed in pairs")
    sizes = [size for size in range(unit_size, min(mine, limit) + 1, unit_size) if mine % size == 0]
    return Share(sizes[-1], mine // sizes[-1])


def counted(number: int, unit: str) -> str:
    """A number and what it counts: "1 batch", "2 batches", "2 epochs".

    Args:
        number: how many.
        unit: what is counted, singular.
    """
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
