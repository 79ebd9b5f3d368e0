"""attnlab: compact attention mechanisms, trained, compressed, converted, decoded and compared."""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False  # of `typing`, which would be imported before the command line can be interrupted in silence
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from attnlab.launch import Run, sweep, train
    from attnlab.trained import Model

__all__ = ["Run", "load", "sweep", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attnlab import launch  # takes half a second to import

    return getattr(launch, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load(run: str | Path, *settings: str, config_dir: str | None = None) -> Model:
    """The trained model of a run directory or an exported folder. Neither its training corpus nor a cache is needed.

        >>> model = attnlab.load("outputs/mustc/mtla/RUN")
        >>> model.predict("speech.wav")
        {'prediction': 'Guten Morgen.'}

    Args:
        run: the run directory, a file of weights in its checkpoints/, a folder that `mode=export` wrote, or a GGUF
            file.
        settings: decoding and hardware as on the command line, "task.decode.beam=1", "hardware=cpu"; what would make
            another model is refused. An exported folder takes none.
        config_dir: the directory of the YAML files that name your own classes, if the run has any: a run directory
            cannot bring code.

    Returns:
        An object with `predict` (see :meth:`attnlab.trained.Model.predict`). That of a run also has `module`, with
        the weights, and `cfg`.

    Raises:
        ConfigError: `run` is no run directory, or a setting is refused.
        DataError: a file of the run is missing, damaged or of another model.
    """
    from pathlib import Path

    from attnlab.run.loading import configuration
    from attnlab.trained import Trained, exported  # torch takes seconds to import

    folder = Path(run).expanduser()
    is_model = (folder / "config.json").is_file() and not (folder / "config.yaml").is_file()
    if not settings and (is_model or folder.suffix == ".gguf"):
        return exported(folder)
    return Trained(configuration(run, *settings, config_dir=config_dir))
