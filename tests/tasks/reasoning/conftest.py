"""Folders of tiny models of every family, with a tokenizer that cuts any text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import pytest

from attnlab.data.samples.world import write_world
from attnlab.pretrained import huggingface
from attnlab.tasks.reasoning.model import IDS, VOCABULARY, sample_tokenizer
from tests.pretrained.conftest import cache as _no_network  # noqa: F401
from tests.pretrained.tiny import OPTIONS, fill

Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def random_model(kind: str) -> Any:
    """A model for the words of the sample world; its weights are the same every time."""
    sizes = {**OPTIONS[kind], "vocab_size": VOCABULARY, **IDS}
    sizes |= {key: 260 for key in ("max_position_embeddings", "n_positions") if key in sizes}
    return fill(huggingface.create("tiny", {"model_type": kind, **sizes}))


@pytest.fixture(scope="session")
def folder(tiny_cache: Path) -> Folder:
    """folder("gptj") -> the folder of a random model."""
    words = sample_tokenizer(write_world(tiny_cache / "samples", 1))

    def make(kind: str) -> Path:
        place = tiny_cache / kind
        if not place.is_dir():
            random_model(kind).save_pretrained(place)
            words.save_pretrained(place)
        return place

    return make
