"""mode=predict checkpoint=RUN input=...: the output of a trained model for new inputs."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig

from attnlab.data.inputs import OBJECTS, Inputs
from attnlab.data.report import Report
from attnlab.errors import ConfigError, printable
from attnlab.run.console import progress
from attnlab.run.device import record_compiled
from attnlab.run.files import replacing, writing
from attnlab.tasks.base import Predicts, task_of
from attnlab.trained import Trained

EVERY_TASK = True  # a task need not list this mode in `task.modes`
PRINTS_AT_ONCE = True
KEEPS = False  # no run directory, unless hydra.run.dir= names one


def run(cfg: DictConfig, record: dict[str, Any], directory: Path | None) -> None:
    """Print a line for each input, or write it to `output=`.

    JSONL gives JSONL with the keys of the input; so does an output that is called .jsonl. Files of a folder are
    named before a tab.

    Raises:
        ConfigError: `output=` names a folder.
        DataError: an input cannot be read, or a file of the run.
        WriteError: `output=` cannot be written.
    """
    report = Report()
    with report.of("input") as split:
        inputs = Inputs(cfg.input, task_of(cfg, Predicts).input_kind)  # before the model is read, and so is output=
        split.used, split.unit = len(inputs), "inputs"
        _predict(cfg, record, inputs)
    if split.left_out or split.noted:
        report.show()
    record["data"] = report.plain()


def _predict(cfg: DictConfig, record: dict[str, Any], inputs: Inputs) -> None:
    objects = inputs.form == "objects" or Path(cfg.output or "").suffix.lower() in OBJECTS
    with destination(cfg.output) as file:
        trained = Trained(cfg)
        predictor = trained.predictor()
        record_compiled(cfg, trained.module.compiled_steps_part, record["environment"])
        began = time.perf_counter()
        visible = cfg.output is None and sys.stdout.isatty()  # the results themselves are the progress
        with nullcontext(lambda rows: None) if visible else progress("predicting", len(inputs)) as advance:
            for item, result in predictor.results(inputs):
                if objects:
                    keys = item.fields or {inputs.kind.keys[0]: item.value}
                    line = json.dumps(keys | result, ensure_ascii=False)
                else:
                    place = f"{item.value}\t" * (inputs.form == "folder")
                    line = printable(place + predictor.shown(result), keep="\t")
                print(line, file=file, flush=True)
                if error := getattr(file, "error", None):  # nobody reads the rest
                    raise error
                advance(1)
    record["corpus"] = "none: input="
    record["predicted"] = {"inputs": len(inputs), "seconds": round(time.perf_counter() - began, 3)}


@contextmanager
def destination(output: str | None) -> Iterator[TextIO]:
    """Standard output, or a file that is there when it is complete. A pipe or a device is written to as it is."""
    if output is None:
        yield sys.stdout
        return
    path = Path(output).expanduser().resolve()
    if path.is_dir() or not output:
        raise ConfigError(f"output={output}: {'a folder' if output else 'empty'}; expected the file to write")
    if path.exists() and not path.is_file():
        with _opened(path, path) as file:
            yield file
        return
    with replacing(path) as partial, _opened(partial, path) as file:
        yield file


def _opened(path: Path, meant: Path) -> TextIO:
    with writing(meant):
        return path.open("w", encoding="utf-8", errors="surrogateescape")
