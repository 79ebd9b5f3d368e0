"""A trained model, loaded from its run directory alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from attnlab.data.inputs import Inputs
from attnlab.run.record import mechanism_of
from attnlab.tasks.base import Predicts, Restores, task_of

if TYPE_CHECKING:
    from attnlab.tasks.prediction import Predictor


class Trained:
    """The model of a run, ready to compute. :func:`attnlab.load` makes it.

    Attributes:
        cfg: the configuration, whose `checkpoint` names the run directory or a file of weights in it.
        task: the object that wires its parts.
        module: has the `model` with its weights, in evaluation mode on the device of `hardware.accelerator`; of text
            also the `tokenizer` or the `vocabulary`, of images the `classes`.

    Raises:
        DataError: a file of the run is missing or damaged.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.task = task_of(cfg, Restores)
        self.module: Any = self.task.restore()

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.module.model.parameters())
        mechanism = mechanism_of(self.cfg.choices)
        return f"Trained(task={self.cfg.task.name}, attention={mechanism}, parameters={count:,})"

    def predictor(self, **settings: Any) -> Predictor:
        """The predictor of new inputs; `settings` as for :meth:`predict`."""
        return task_of(self.cfg, Predicts).predictor(self.module, **settings)

    def predict(self, inputs: str | Path | Sequence[str | Path], **settings: Any) -> Any:
        """Compute the output of the model for new inputs.

        Args:
            inputs: one input or several. Of speech and images, files or folders. Of text, a str is a text, and a Path
                is a .txt file with a text in each line or a .jsonl file with an object in each.
            settings: of decoding, in place of the run's: `beam=1` and other arguments of BeamSearch, of a language
                model `tokens=20`, `temperature=0` and other arguments of Sampling, of images `top=3`.

        Returns:
            A dict for one text or file; a list of dicts for a folder, a file of lines or objects, and several inputs.
            `prediction` is the text (a translation, transcript, summary or continuation) or the most probable class.
            Understanding adds `intent`; images add `classes`, a list of {"class": name, "probability": p}, the most
            probable first. Keys of JSON objects stay.

        Raises:
            ConfigError: there is no such setting.
            DataError: an input is missing, empty or not of the kind that the model reads.
        """
        values: Any = inputs
        several = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping)
        kind = task_of(self.cfg, Predicts).input_kind
        parts = [Inputs(value, kind) for value in (values if several else [values])]
        items = [item for part in parts for item in part]
        results = [item.fields | result for item, result in self.predictor(**settings).results(items)]
        return results if several or parts[0].form != "one" else results[0]
