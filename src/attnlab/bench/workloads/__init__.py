"""What mode=bench measures: the workload class behind each value of `bench.what`."""

import pkgutil

from attnlab.bench.workloads.base import Variant, Workload

__all__ = ["WORKLOADS", "Variant", "Workload", "workload_type"]

WORKLOADS = {  # imported when it is measured: some need timm or transformers
    "training": "training:Training",
    "model": "training:ModelTraining",
    "decoding": "decoding:Decoding",
    "generation": "decoding:Generation",
    "prefill": "decoding:Prefill",
    "beam": "decoding:Beam",
    "projections": "compressed:Projections",
    "whole": "compressed:CompressedModel",
    "decomposition": "decomposition:Decomposition",
    "forward": "vision:VisionLayer",
    "kernels": "kernels:Kernels",
}


def workload_type(what: str) -> type[Workload]:
    """The class of a workload. ValueError: there is no workload of this name."""
    if what not in WORKLOADS:
        raise ValueError(f"no workload {what}")
    workload: type[Workload] = pkgutil.resolve_name(f"{__name__}.{WORKLOADS[what]}")
    return workload
