"""A mode is one file in modes/: it is found by its name, and it states whether every task has it."""

from pathlib import Path

import pytest

import attnlab.modes
from attnlab.config.check import compose
from attnlab.config.settings import MODES, modes_of_every_task
from attnlab.errors import ConfigError


def test_modes_are_the_files_of_the_folder() -> None:
    folder = Path(attnlab.modes.__file__).parent
    assert set(MODES) == {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert modes_of_every_task() == ("describe", "export", "predict")


@pytest.mark.parametrize("task", ["mustc", "wikitext2", "imagenet"])
def test_every_task_can_be_described(task: str) -> None:
    assert compose(f"task={task}", "mode=describe").mode == "describe"


def test_a_mode_that_a_task_does_not_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="it has train, compress, test, bench, describe"):
        compose("task=imagenet", "mode=generate")
