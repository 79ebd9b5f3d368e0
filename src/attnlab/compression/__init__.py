"""Compression of pretrained models: methods, compressed modules, counting, saved folders."""

import attnlab.torchvision_schemas  # before timm

from attnlab.compression.folder import load, save
from attnlab.compression.methods.base import Method
from attnlab.compression.transform import compress, densify, outline
