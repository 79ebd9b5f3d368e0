"""How processes share an update, and what is refused before torch is imported."""

import re
from contextlib import nullcontext
from typing import Any

import pytest
from omegaconf import OmegaConf

from attnlab.config.batch import FrameShare, Share, check_batch, share_equally, share_frames
from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.run.identity import recipe
from tests.config.test_command_line import RECIPES


@pytest.mark.parametrize(
    ("devices", "limit", "expected"),
    [
        (1, 24, Share(24, 20)),
        (4, 24, Share(24, 5)),  # published for T6 small
        (8, 24, Share(20, 3)),
        (8, 20, Share(20, 3)),  # medium
        (8, 15, Share(15, 4)),  # large
        (8, 6, Share(6, 10)),  # xl
        (480, 24, Share(1, 1)),
    ],
)
def test_an_update_of_480_windows(devices: int, limit: int, expected: Share) -> None:
    assert share_equally("tokens", 480 * 1024, limit, devices, 1024) == expected
    assert expected.size * expected.accumulate * devices == 480


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_t6_small_is_one_recipe_on_any_number_of_devices(devices: int) -> None:
    published = ["task=fineweb_edu", "scale=paper_small", "attention=tpa"]
    one = compose(*published)
    several = compose(*published, "hardware=ddp", f"hardware.devices={devices}", "task.data.batch_size=20")
    assert one.task.train.batch.tokens == 480 * 1024
    assert recipe(several) == recipe(one)
    assert recipe(compose(*published, "task.train.batch.tokens=245760")) != recipe(one)


@pytest.mark.parametrize("task", ["wikitext2", "mustc", "slurp", "imagenet"])
def test_an_older_record_is_the_same_recipe(task: str) -> None:
    """`accumulate` batches of each device are now what an update sees."""
    cfg = compose(f"task={task}", "task.train.batch.bucket=1000" if task in ("mustc", "slurp") else "seed=1")
    old: Any = OmegaConf.to_container(cfg)
    del old["task"]["train"]["batch"]
    for key in ("update_tokens", "update_frames", "update_images", "bucket_frames", "split_buckets"):
        old["task"]["data"].pop(key, None)
    old["task"]["train"]["accumulate"] = 4 if task in ("mustc", "slurp") else 1
    assert recipe(old) == recipe(cfg)


def test_an_older_record_on_two_devices_saw_twice_as_much() -> None:
    old: Any = OmegaConf.to_container(
        compose("task=mustc", "task.train.batch.frames=8000", "task.train.batch.bucket=4000")
    )
    expected = recipe(old)
    del old["task"]["train"]["batch"]
    for key in ("update_frames", "bucket_frames", "split_buckets"):
        del old["task"]["data"][key]
    old["task"]["train"]["accumulate"], old["hardware"]["devices"] = 1, 2
    assert recipe(old) == expected


@pytest.mark.parametrize(
    ("processes", "limit", "expected"),
    [
        (1, 40_000, FrameShare(8, 1, 8)),  # published
        (4, 40_000, FrameShare(8, 1, 2)),
        (8, 40_000, FrameShare(8, 1, 1)),
        (16, 40_000, FrameShare(8, 2, 1)),
        (3, 40_000, FrameShare(8, 3, 8)),
        (1, 20_000, FrameShare(8, 3, 24)),  # halves could exceed the limit by a sentence of 3,000 frames
        (2, 21_500, FrameShare(8, 2, 8)),
    ],
)
def test_an_update_of_8_buckets(processes: int, limit: int, expected: FrameShare) -> None:
    assert share_frames(320_000, 40_000, limit, 3000, processes) == expected


@pytest.mark.parametrize(
    ("images", "limit", "processes", "paired", "expected"),
    [
        (512, 512, 1, True, Share(512, 1)),
        (512, 256, 1, True, Share(256, 2)),
        (512, 512, 4, True, Share(128, 1)),
        (36, 10, 2, False, Share(9, 2)),
        (36, 10, 2, True, Share(6, 3)),
        (7, 7, 1, True, Share(7, 1)),  # one batch may be odd
    ],
)
def test_an_update_of_images(images: int, limit: int, processes: int, paired: bool, expected: Share) -> None:
    assert share_equally("images", images, limit, processes, paired=paired) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "task=wikitext2 hardware.devices=3",
            "task.train.batch.tokens=2048 (32 windows) cannot be shared equally by 3 processes; "
            "nearest: 1920 or 2112, or hardware.devices=2 or 4",
        ),
        (
            "task=wikitext2 task.train.batch.tokens=100",
            "expected a multiple of task.data.window=64; nearest: 64 or 128",
        ),
        ("task=wikitext2 task.train.batch.tokens=0", "task.train.batch.tokens=0: expected int >= 1"),
        ("task=wikitext2 task.data.batch_size=0", "task.data.batch_size=0: expected int >= 1"),
        ("task=imagenet hardware.devices=4", "nearest: 48 or 52, or hardware.devices=2 or 5"),
        (
            "task=imagenet task.mixup.mixup_alpha=0.8 hardware.devices=2",
            "task.train.batch.images=50 cannot be shared equally in pairs (task.mixup) by 2 processes; "
            "nearest: 48 or 52, or hardware.devices=1 or 5",
        ),
        (
            "task=mustc task.train.batch.frames=4001 task.train.batch.bucket=2000",
            "task.train.batch.frames=4001: expected a multiple of task.train.batch.bucket=2000; nearest: 4000 or 6000",
        ),
        ("task=mustc task.data.max_frames=2000", "expected more than the longest sentence accepted (3000 frames)"),
        (
            "task=slurp hardware=ddp task.train.batch.frames=3000 task.train.batch.bucket=1000",
            "cannot share 3 buckets",
        ),
        ("task=imagenet hardware.devices=4 mode=describe", "nearest: 48 or 52"),
        ("task=slurp task.data.max_frames=3000", "expected at least task.train.batch.bucket=4000"),
        ("task=slurp hardware.devices=3 hardware.num_nodes=2 task.train.batch.bucket=1000", "6 processes cannot share"),
    ],
)
def test_what_cannot_be_shared_is_refused_early(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        compose(*line.split())
    assert "\n" not in str(caught.value)


def test_what_depends_on_the_machine_is_not_refused_early() -> None:
    compose("task=slurp", "hardware.devices=auto")


PUBLISHED = {  # updates of 60 windows, and a sample of 250 images that an update of 50 divides
    ("lm1b", "paper"): (1, 2, 4),
    ("wikitext103", "paper"): (1, 2, 4),
    ("imagenet", "sample"): (1, 2),
}


@pytest.mark.parametrize(("task", "scale"), RECIPES)
def test_one_two_four_and_eight_devices_train_every_recipe(task: str, scale: str) -> None:
    cfg = compose(f"task={task}", f"scale={scale}", *["attention=multilinear"] * (task == "ptb"))
    devices = PUBLISHED.get((task, scale), (1, 2, 4, 8))
    for count in (1, 2, 4, 8):
        with nullcontext() if count in devices else pytest.raises(ConfigError, match="cannot be shared equally"):
            check_batch(cfg, count)


@pytest.mark.parametrize(("processes", "expected"), [(1, FrameShare(1, 1, 1)), (8, FrameShare(1, 8, 1))])
def test_one_bucket_is_divided_once(processes: int, expected: FrameShare) -> None:
    assert share_frames(18_000, 18_000, 18_000, 3000, processes, split=False) == expected
