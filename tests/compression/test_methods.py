"""Promises of every method, by discovery of its file in conf/compress."""

import copy
from pathlib import Path

import pytest
import torch

from attnlab.compression import Method, compress, densify, load, outline, save
from attnlab.compression.counting import parameters
from attnlab.config.build import CONF, instantiate
from attnlab.config.check import compose
from attnlab.pretrained import family_of
from tests.compression.models import NAMES, OPTIONS, images, vit

FILES = sorted(path.stem for path in (CONF / "compress").glob("*.yaml") if path.stem != "none")


@pytest.fixture(params=FILES)
def method(request: pytest.FixtureRequest) -> Method:
    cfg = compose("task=imagenet", f"compress={request.param}", "rank=5")
    result = instantiate(cfg.compress, path="compress")
    assert isinstance(result, Method)
    return result


def test_a_method(method: Method, tmp_path: Path) -> None:
    """Plans on meta, leaves other weights unchanged, has the sizes of its outline, is stored, saved and densified."""
    model, plain = vit(), vit()
    units = method.units(vit().to("meta"), family_of(plain).layers(plain))
    reports = compress(model, method, tmp_path / "store")
    assert [report["path"] for report in reports] == [unit.path for unit in units]
    assert next(rank for report in reports if (rank := method.rank_of(report)) is not None) == 5
    outlined = vit().to("meta")
    outline(outlined, method)
    assert parameters(outlined) == parameters(model)
    assert parameters(model)["total"] < parameters(plain)["total"]
    read = {name for name in plain.state_dict() if any(name.startswith(f"{p}.") for unit in units for p in unit.reads)}
    for name, value in plain.state_dict().items():
        assert name in read or torch.equal(model.state_dict()[name], value), name
    again = vit()
    assert all(report["stored"] for report in compress(again, method, tmp_path / "store"))
    save(model, tmp_path / "saved", NAMES[0], OPTIONS)
    for other in (again, load(tmp_path / "saved"), copy.deepcopy(model)):
        assert torch.equal(other(images()), model(images()))
    dense = densify(model, vit(), exact=False)
    assert dense(images()).isfinite().all() and parameters(dense) == parameters(plain)
