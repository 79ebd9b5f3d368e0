from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def repeatable(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread, one seed, and NaN in every uninitialised tensor, so that none can be read unseen.

    On a GPU operations are those of real runs: deterministic ones are other kernels.
    """
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not request.node.get_closest_marker("gpu"):
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(strict)
    torch.set_num_threads(threads)
