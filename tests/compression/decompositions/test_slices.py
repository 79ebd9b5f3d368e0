import pytest
import torch

from attnlab.compression.decompositions.slices import Slices
from tests.compression.decompositions.planted import products


def test_sums_over_products_are_those_of_the_tensor() -> None:
    tensor = products()
    y = tensor.dense()
    a, b, c = (torch.randn(size, 5, dtype=torch.float64) for size in tensor.sizes)
    torch.testing.assert_close(tensor.square(), y.square().sum())
    torch.testing.assert_close(tensor.combine(c[:, 0]), y @ c[:, 0])
    for mode, formula in enumerate(("jr,hr->ir", "ir,hr->jr", "ir,jr->hr")):
        others = [x for i, x in enumerate((a, b, c)) if i != mode]
        torch.testing.assert_close(tensor.mttkrp(mode, a, b, c), torch.einsum(f"ijh,{formula}", y, *others))
    difference = y - torch.einsum("ir,jr,hr->ijh", a, b, c)
    torch.testing.assert_close(tensor.error(a, b, c), difference.norm() / y.norm())


def test_the_error_of_an_exact_decomposition_is_no_difference_of_squares() -> None:
    a, b, c = (torch.randn(size, 4, dtype=torch.float64) for size in (9, 8, 3))
    tensor = Slices.of(torch.einsum("ir,jr,hr->ijh", a, b, c))
    assert float(tensor.error(a, b, c)) < 1e-14


def test_sides_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="do not match"):
        Slices(torch.randn(3, 9, 4), torch.randn(3, 9, 5))
