"""The front end over a pretrained speech model: its layers mixed with learned weights."""

import torch
from torch import Tensor, nn

from attnlab.attention.base import blank


class LayerMix(nn.Module):
    """sum_l softmax(w)_l h_l over the layers h_l of a pretrained model, without its mean over the utterance.

    The weighted sum is that of SUPERB (Yang et al. 2021, section 2) and of S3PRL's featurizer: one number w_l for each
    layer, all zero at first, so that it begins as the mean of the layers. Taking the mean over the utterance off is
    ESPnet's `UtteranceMVN` with its defaults. Both stand in the front end of the MTLA paper's AMI recipe, where they
    are computed in float32 whatever the precision of the model.

    Args:
        num_layers: L, the pretrained model's layers and the input of the first one.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_layers))

    def shares(self) -> Tensor:
        """The share of each layer, (L,), which add up to 1."""
        return self.weights.softmax(0)

    def forward(self, layers: Tensor, lengths: Tensor) -> Tensor:
        """Features (B, S, L, F) and their lengths (B,) -> (B, S, F), zeros after the end of a row."""
        with torch.autocast(layers.device.type, enabled=False):
            wide = torch.promote_types(self.weights.dtype, torch.float32)
            shares = self.shares().to(wide).expand(*layers.shape[:2], 1, -1)
            mixed = blank(shares, lengths) @ layers.to(wide)  # without a copy of the layers, whose padding may be NaN
            mixed = blank(mixed.squeeze(2), lengths)
            mean = mixed.sum(1, keepdim=True) / lengths.view(-1, 1, 1)
            return blank(mixed - mean, lengths).to(layers.dtype)
