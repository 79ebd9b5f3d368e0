"""Compressing pretrained vision transformers: methods, the modules they put in place, counting, folders."""

import attnlab.torchvision_schemas  # noqa: F401  (before timm)

from attnlab.compression.folder import load, save
from attnlab.compression.methods.base import Method
from attnlab.compression.methods.cp_slimatt import CPSlimAtt
from attnlab.compression.methods.global_svd import GlobalSVD
from attnlab.compression.methods.irratt import IrrAtt
from attnlab.compression.methods.mlp_svd import MLPSVD
from attnlab.compression.methods.truncatt import TruncAtt
from attnlab.compression.modules.attention import FactoredAttention, LowRankLinear, SlimAttention
from attnlab.compression.modules.dense import densify
from attnlab.compression.transform import compress, outline

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
