"""Declare two torchvision operators where torchvision's own library cannot, so that torchvision imports.

On import, torchvision registers output shapes for `torchvision::nms` and `torchvision::qnms`. The operators are defined
by its C++ library, and the build of that library on PyPI needs CUDA: with a CPU build of torch it does not load, and
importing torchvision (and with it timm, torchmetrics and lightning) fails with "operator torchvision::nms does not
exist". attnlab calls neither operator, so declaring their signatures is enough. Where the C++ library loads, it
declares them, and a second declaration would be an error: therefore the library is tried first.

Import this module before the first import of lightning, torchmetrics, timm or torchvision.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _library_loads() -> bool:
    """Load torchvision's C++ operators without importing torchvision; whether that worked."""
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
