"""Conversion of a trained decoder's attention into another mechanism, with the smallest loss that is known."""

from attnlab.conversion.base import Conversion, Layer
from attnlab.conversion.gqa import ToGQA
from attnlab.conversion.mla import ToMLA
from attnlab.conversion.mtla import ToMTLA
from attnlab.conversion.settings import Calibration, Healing
from attnlab.conversion.tpa import ToTPA

__all__ = ["Calibration", "Conversion", "Healing", "Layer", "ToGQA", "ToMLA", "ToMTLA", "ToTPA"]
