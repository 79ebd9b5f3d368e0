import gc

import pytest

from attnlab.bench import exactness


@pytest.fixture(autouse=True)
def _no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every row a measurement collects garbage, of which a process of tests has much."""
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)


@pytest.fixture
def short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of few positions."""
    for name, value in {"TEXT": 13, "FEW": 5, "PREFIX": 3, "STEPS": 4}.items():
        monkeypatch.setattr(exactness, name, value)
