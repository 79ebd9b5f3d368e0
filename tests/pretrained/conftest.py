from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and a hub that cannot be reached."""

    def unreachable(*args: Any, **options: Any) -> None:
        raise OSError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    return tmp_path / "cache"
