"""What mode=bench measures: a file, with a class of its name, for each value of `bench.what`."""

import importlib
import pkgutil

from attnlab.bench.workloads.base import Variant, Workload

__all__ = ["Variant", "Workload", "workload_type"]

NAMES = tuple(module.name for module in pkgutil.iter_modules(__path__) if module.name not in ("base", "attention"))


def workload_type(what: str) -> type[Workload]:
    """The class of a workload, for instance Training of training.py.

    Args:
        what: the name of a file of this folder.

    Raises:
        ValueError: there is no such workload.
    """
    if what not in NAMES:
        raise ValueError(f"no workload {what}")
    found: type[Workload] = getattr(importlib.import_module(f"{__name__}.{what}"), what.title())
    return found
