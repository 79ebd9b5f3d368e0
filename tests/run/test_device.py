"""The device of a run: what `precision: auto` becomes on it, what it lacks, and how it multiplies float32 matrices."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from attnlab.config import build
from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.run import device
from attnlab.run.identity import recipe

OLD, NEW = (7, 5), (9, 0)  # compute capabilities: T4, H100


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """The CUDA devices of this machine, as far as attnlab asks torch about them; empty: a CPU torch."""
    devices: list[tuple[int, int]] = []
    monkeypatch.setattr(build, "has_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(devices))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: devices[i])
    yield devices
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("options", "devices", "expected"),
    [
        (("hardware=auto",), [], "32-true"),
        (("hardware=auto",), [NEW], "bf16-mixed"),
        (("hardware=cpu",), [NEW], "32-true"),
        (("hardware=gpu",), [NEW], "bf16-mixed"),
        (("hardware=gpu",), [], "bf16-mixed"),  # a login node
        (("hardware=gpu", "hardware.devices=[1]"), [OLD, NEW], "bf16-mixed"),
        (("hardware=gpu", "hardware.devices=auto"), [OLD, NEW], "32-true"),
        (("hardware=gpu", "hardware.precision=16-mixed"), [NEW], "16-mixed"),
    ],
)
def test_the_precision_that_auto_stands_for(
    cuda: list[tuple[int, int]], options: tuple[str, ...], devices: list[tuple[int, int]], expected: str
) -> None:
    cuda += devices
    assert compose(*options).hardware.precision == expected


def test_products_in_tf32_count_where_they_are(cuda: list[tuple[int, int]]) -> None:
    """Exact products are another recipe on a device that has TF32; elsewhere, and by default, nothing changes."""
    exact = "hardware.tf32=false"
    assert recipe(compose("hardware=auto", exact)) == recipe(compose("hardware=auto"))
    cuda.append(OLD)
    assert recipe(compose("hardware=gpu", exact)) == recipe(compose("hardware=gpu"))
    cuda[0] = NEW
    assert recipe(compose("hardware=cpu", exact)) == recipe(compose("hardware=cpu"))
    default: Any = OmegaConf.to_container(compose("hardware=gpu"), resolve=True)
    assert recipe(compose("hardware=gpu", exact)) != recipe(default)
    del default["hardware"]["tf32"]  # of a run that is older than the key
    assert recipe(default) == recipe(compose("hardware=gpu"))


@pytest.mark.parametrize(
    ("options", "devices", "message"),
    [
        (("hardware=cpu", "hardware.precision=16-mixed"), [NEW], "float16 needs a CUDA device; take .*32-true"),
        (("hardware=auto", "hardware.precision=16-mixed"), [], "float16 needs a CUDA device"),
        (("hardware=gpu", "hardware.precision=bf16-mixed"), [OLD], "capability 7.5 has no bfloat16 .*or 16-mixed"),
        (("hardware=gpu", "hardware.devices=2"), [NEW], "hardware.devices=2: this machine has 1 GPU"),
        (("hardware=gpu",), [], "torch finds no such device here"),
        (("hardware=gpu", "hardware.precision=8-true"), [NEW], "hardware.precision=8-true: expected"),
    ],
)
def test_what_a_device_lacks(
    cuda: list[tuple[int, int]], options: tuple[str, ...], devices: list[tuple[int, int]], message: str
) -> None:
    cuda += devices
    with pytest.raises(ConfigError, match=message):
        device.check_devices(compose(*options))


def prepared(cfg: DictConfig) -> dict[str, Any]:
    environment: dict[str, Any] = {"device": "cuda: X"}
    device.prepare_cuda(cfg, environment)
    return environment


def test_tf32_on_cuda_alone(cuda: list[tuple[int, int]], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    torch.set_float32_matmul_precision("highest")
    cuda.append(NEW)
    assert prepared(compose("hardware=gpu"))["float32_products"] == "TF32"
    assert torch.get_float32_matmul_precision() == "high"
    line = "cuda: X, precision bf16-mixed; products of float32 matrices round their factors to TF32"
    assert line in caplog.messages[0] and len(caplog.messages) == 1
    assert prepared(compose("hardware=gpu", "hardware.tf32=false"))["float32_products"] == "float32"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("accelerator", "variable"), [("cpu", "CXX"), ("gpu", "CC")])
def test_without_a_compiler_the_run_goes_on_and_says_so(
    accelerator: str,
    variable: str,
    cuda: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    cuda.append(NEW)
    cfg = compose("task=wikitext2", f"hardware={accelerator}", "hardware.compile=true")
    environment: dict[str, Any] = {}
    for name, there in (("/nowhere/compiler", False), ("", False), ("", True)):
        monkeypatch.setenv(variable, name)
        monkeypatch.setattr(device.shutil, "which", lambda name, there=there: f"/usr/bin/{name}" if there else None)
        device.record_compiled(cfg, "the loss", environment)
        assert device.compiles(cfg) is there and ("the loss" in caplog.messages[-1]) is there
        assert (environment["compiled"] == "the loss") is there
        if not there:
            assert environment["compiled"].startswith("no: torch.compile needs a C") and name in environment["compiled"]
            assert "nothing is compiled" in caplog.messages[-1] and f"variable {variable}" in caplog.messages[-1]
    plain = compose("task=wikitext2", f"hardware={accelerator}")
    device.record_compiled(plain, "the loss", environment)
    assert not device.compiles(plain) and environment["compiled"] == "no" and len(caplog.messages) == 3
