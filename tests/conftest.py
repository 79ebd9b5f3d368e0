import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real corpora, or skip: ATTNLAB_CORPORA, else ../shared/data beside the checkout."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    root = Path(os.environ.get("ATTNLAB_CORPORA", beside))
    if not root.is_dir():
        pytest.skip("no real corpora here (set ATTNLAB_CORPORA)")
    return root
