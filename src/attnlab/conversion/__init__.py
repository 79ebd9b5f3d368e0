"""Conversion of a trained decoder's attention into another mechanism."""

from attnlab.conversion.base import Conversion, Layer
from attnlab.conversion.gqa import ToGQA
from attnlab.conversion.healing import Healing
from attnlab.conversion.mla import ToMLA
from attnlab.conversion.mtla import ToMTLA
from attnlab.conversion.texts import Calibration
from attnlab.conversion.tpa import ToTPA

__all__ = ["Calibration", "Conversion", "Healing", "Layer", "ToGQA", "ToMLA", "ToMTLA", "ToTPA"]
