"""Sharing an update between processes, and its refusals before torch is imported."""

from contextlib import nullcontext

import pytest

from attnlab.config.batch import FrameShare, Share, check_batch, share_equally, share_frames
from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.run.identity import recipe
from tests.command import ROOT
from tests.config.test_command_line import RECIPES


@pytest.mark.parametrize("devices", [4, 8])
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
    assert share_frames(18_000, 18_000, 18_000, 3000, processes, split=False) == FrameShare(1, processes, 1)


WINDOWS = "tokens", 480 * 1024, 1024, False  # an update of 480 windows
IMAGES = "images", 512, 1, True


@pytest.mark.parametrize(
    ("update", "limit", "processes", "expected"),
    [
        (WINDOWS, 24, 1, Share(24, 20)),
        (WINDOWS, 24, 4, Share(24, 5)),  # published for T6 small
        (WINDOWS, 24, 8, Share(20, 3)),
        (WINDOWS, 20, 8, Share(20, 3)),  # medium
        (WINDOWS, 15, 8, Share(15, 4)),  # large
        (WINDOWS, 6, 8, Share(6, 10)),  # xl
        (WINDOWS, 24, 480, Share(1, 1)),
        (IMAGES, 512, 1, Share(512, 1)),
        (IMAGES, 256, 1, Share(256, 2)),
        (IMAGES, 512, 4, Share(128, 1)),
        (("images", 36, 1, False), 10, 2, Share(9, 2)),
        (("images", 36, 1, True), 10, 2, Share(6, 3)),
        (("images", 7, 1, True), 7, 1, Share(7, 1)),  # one batch may be odd
    ],
)
def test_an_update_is_shared_equally(
    update: tuple[str, int, int, bool], limit: int, processes: int, expected: Share
) -> None:
    unit, size, each, paired = update
    assert share_equally(unit, size, limit, processes, each, paired=paired) == expected
    assert expected.size * expected.accumulate * processes * each == size


def test_what_depends_on_the_machine_is_not_refused_early() -> None:
    compose("task=slurp", "hardware.devices=auto")


MODEL = ROOT / "experiments" / "convert" / "llama_768"  # its config.json alone
PUBLISHED = {  # updates of 60 windows, and a sample of 250 images that an update of 50 divides
    ("lm1b", "paper"): (1, 2, 4),
    ("wikitext103", "paper"): (1, 2, 4),
    ("imagenet", "sample"): (1, 2),
}


@pytest.mark.parametrize(("task", "scale"), RECIPES)
def test_one_two_four_and_eight_devices_train_every_recipe(task: str, scale: str) -> None:
    more = ["attention=multilinear"] * (task == "ptb")
    cfg = compose(f"task={task}", f"scale={scale}", *([f"model={MODEL}"] if scale == "pretrained" else more))
    devices = PUBLISHED.get((task, scale), (1, 2, 4, 8))
    for count in (1, 2, 4, 8):
        with nullcontext() if count in devices else pytest.raises(ConfigError, match="cannot be shared equally"):
            check_batch(cfg, count)
