import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: small operations on two threads wait for each other

import attnlab.torchvision_schemas  # noqa: F401  (before lightning, in whichever test comes first)

import pytest


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real corpora: ATTNLAB_CORPORA, else ../shared/data beside the checkout; without either, skip."""
    root = Path(os.environ.get("ATTNLAB_CORPORA", Path(__file__).parents[2] / "shared" / "data"))
    if not root.is_dir():
        pytest.skip(f"no real corpora: {root} is no directory; set ATTNLAB_CORPORA")
    return root


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    """No environment variable of the person who runs the tests reaches a command line."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DATA_ROOT", "HYDRA_FULL_ERROR", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        patch.setenv("ATTNLAB_STAMP", "test")
        yield


@pytest.fixture(autouse=True)
def _loggers() -> Iterator[None]:
    """Undo what the test before, or a library in it, has done to the project's loggers and to its environment."""
    yield
    os.environ["ATTNLAB_STAMP"] = "test"  # the command itself sets when it began
    logging.disable(logging.NOTSET)
    logging.getLogger().setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:  # a rank other than zero prints errors only
        handler.setLevel(logging.NOTSET)
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "attnlab":
            logger.disabled, logger.propagate, logger.level = False, True, logging.NOTSET


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Keep the modules' objects out of garbage collection: composing makes many objects and starts it often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _default_signals() -> None:
    """nohup ignores SIGHUP and `&` in a script SIGINT; the tests, and the processes that they start, need neither."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
