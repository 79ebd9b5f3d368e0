"""Declare two torchvision operators where torchvision's own library cannot, so that torchvision imports.

While it is imported, torchvision tells torch the output shapes of `torchvision::nms` and `torchvision::qnms`. The
operators themselves come from its C++ library, and the package index's build of that library needs CUDA: beside a CPU
build of torch it does not load, and importing torchvision (hence timm and torchmetrics, hence lightning) ends with
"operator torchvision::nms does not exist". attnlab calls neither operator; declaring their signatures is enough.
Where the C++ library loads it declares them itself, and declaring them twice would be an error: so it goes first.

Import this module before the first import of lightning, torchmetrics, timm or torchvision.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _library_loads() -> bool:
    """Load torchvision's C++ operators without importing torchvision."""
    spec = find_spec("torchvision")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for library in Path(folder).glob("_C*"):
            try:
                torch.ops.load_library(str(library))
            except OSError:  # a library that this torch lacks, most often libcudart
                return False
            return True
    return False


if not _library_loads():
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", SCHEMA)
