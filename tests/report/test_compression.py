"""Compressed models as a table and plots."""

from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch

from attnlab.compression import folder
from attnlab.compression.methods.irratt import IrrAtt
from attnlab.compression.transform import compress
from attnlab.report import compression

VIT: dict[str, Any] = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


def test_the_fusion_shown_is_that_of_the_saved_model(tmp_path: Path) -> None:
    model = timm.create_model("deit_small_patch16_224", **VIT)
    compress(model, IrrAtt(rank=8, vo_rank=4), None)
    with torch.no_grad():
        model.get_parameter("blocks.1.attn.fusion").copy_(torch.tensor([[1.0, 0.5], [0.25, 2.0]]))
    folder.save(model, tmp_path, "deit_small_patch16_224", VIT)
    fusion = compression.fusions(tmp_path)
    assert fusion.loc[fusion["layer"] == 1, "weight"].tolist() == ["1", "0.5", "0.25", "2"]


def test_a_fusion_matrix_in_blocks() -> None:
    weights = np.array([[0.1, 0.0, 4.0, 0.0], [2.0, 0.5, 1.0, 0.0], [0.2, 0.1, 0.4, 0.0], [0.0, 0.4, 0.4, 0.0]])
    order, blocks = compression.reordered(weights)
    assert order == [0, 1, 2, 3]  # heads 0 and 1 have two columns each: the third one, and the last, of zeros
    assert blocks.tolist() == [[1.0, 0.0, 0.05, 0.0], [0.25, 0.0, 1.0, 1.0], [0.1, 0.0, 0.1, 0.2], [0.1, 0.0, 0.0, 0.8]]
    order, blocks = compression.reordered(weights[[2, 1, 0, 3]][:, :3])
    assert order == [1, 2, 0, 3] and blocks.argmax(0).tolist() == [0, 0, 1]
