"""The Conformer encoder."""

import pytest
import torch
from torch.nn import functional as F

from attnlab.models.conformer import ConvolutionModule, MaskedBatchNorm


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_torch_s_over_the_real_frames(training: bool) -> None:
    torch.manual_seed(0)
    norm, real = MaskedBatchNorm(8).double().train(training), torch.arange(9) < torch.tensor([[9], [5], [1]])
    reference = torch.nn.BatchNorm1d(8).double().train(training)
    for module in (norm, reference):
        torch.manual_seed(1)
        for value in (module.weight.data, module.bias.data, module.running_mean):
            assert value is not None
            value.normal_()
    x, g = torch.randn(3, 9, 8).double(), torch.randn(3, 9, 8).double()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    output, want = norm(inputs[0], real), torch.zeros_like(x)
    want[real] = reference(inputs[1][real])
    torch.testing.assert_close(output, want)
    grads = [
        torch.autograd.grad((y * g).sum(), [i, m.weight, m.bias])
        for y, i, m in zip((output, want), inputs, (norm, reference), strict=True)
    ]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(norm.state_dict(), reference.state_dict())


def test_the_convolution_is_the_formula() -> None:
    module = ConvolutionModule(8, 3, 0.0).double().eval()
    x = torch.randn(1, 6, 8).double()
    h = F.glu(module.widen(module.norm(x)), -1)[0]
    weight = module.depthwise.weight[:, 0]
    padded = F.pad(h, (0, 0, 1, 1))
    h = torch.stack([sum(padded[t + j] * weight[:, j] for j in range(3)) for t in range(6)])  # type: ignore[misc]
    h = h / torch.sqrt(torch.tensor(1 + module.batch_norm.eps))
    want = module.mix(h * torch.sigmoid(h))
    torch.testing.assert_close(module(x, torch.ones(1, 6, dtype=torch.bool))[0], want)


def test_an_even_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel=4: it must be odd"):
        ConvolutionModule(8, 4, 0.0)
