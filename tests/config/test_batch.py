"""How processes share an update, and what is refused before torch is imported."""

from contextlib import nullcontext

import pytest

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
