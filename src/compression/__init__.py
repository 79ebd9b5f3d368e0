"""Compressing pretrained vision transformers: methods, the modules they put in place, counting, folders."""

import src.torchvision_schemas  # noqa: F401  (before timm)

from .attention import FactoredAttention, LowRankLinear, SlimAttention
from .cp_slimatt import CPSlimAtt
from .dense import densify
from .folder import load, save
from .global_svd import GlobalSVD
from .irratt import IrrAtt
from .method import Method
from .mlp_svd import MLPSVD
from .transform import compress, outline
from .truncatt import TruncAtt

__all__ = [
    "CPSlimAtt",
    "FactoredAttention",
    "GlobalSVD",
    "IrrAtt",
    "LowRankLinear",
    "MLPSVD",
    "Method",
    "SlimAttention",
    "TruncAtt",
    "compress",
    "densify",
    "load",
    "outline",
    "save",
]
