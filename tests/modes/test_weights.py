"""Impossible weights of a run: every mode that reads them refuses them and names file and tensor."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from attnlab.config.check import check
from attnlab.errors import DataError
from attnlab.pretrained.weights import write_weights
from attnlab.run.loading import load
from tests.modes.conftest import TrainedRun
from tests.modes.test_export_trained import IMAGES, LANGUAGE, TRANSLATION

TASKS = {"language": LANGUAGE, "images": IMAGES, "translation": TRANSLATION}
COMMANDS = {
    "language": ("predict", "generate", "export", "evaluate"),
    "images": ("predict", "export"),
    "translation": ("predict",),
}
DAMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN or infinite": lambda value: torch.full_like(value, torch.nan),
    "dtype int32": lambda value: value.int(),
}


@pytest.mark.parametrize(("task", "mode"), [(task, mode) for task, modes in COMMANDS.items() for mode in modes])
def test_weights_that_are_no_numbers_are_refused(task: str, mode: str, trained_run: TrainedRun, tmp_path: Path) -> None:
    run, module = trained_run(*TASKS[task])
    Image.new("RGB", (32, 32)).save(tmp_path / "w1.png")
    words = {"predict": f"input='{tmp_path / 'w1.png' if task == 'images' else 'w1 w2'}'", "generate": "prompt='w1'"}
    cfg = check([f"mode={mode}", f"checkpoint='{run}'", "hardware=cpu", *filter(None, [words.get(mode)])], load).jobs[0]
    for expected, damaged in DAMAGES.items():
        weights = dict(module.model.state_dict())
        name = sorted(weights)[-1]
        weights[name] = damaged(weights[name])
        write_weights(run / "checkpoints" / "averaged.safetensors", weights, module.identity)
        with pytest.raises(DataError, match=rf"averaged.safetensors: {name} has .*{expected}"):
            import_module(f"attnlab.modes.{mode}").run(cfg, {}, tmp_path / "out")
        assert not (tmp_path / "out").exists()
