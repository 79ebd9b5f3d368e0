"""A model that is not there is refused from the command line alone."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import timm
from timm.models import VisionTransformer

from attnlab.config.check import compose
from attnlab.config.model import TIMM, check_architecture, check_model
from attnlab.errors import ConfigError

ASKED = "attnlab.tasks.reasoning.model.AskedModel"


@pytest.mark.parametrize("source", ["/no/such/folder", "./there", "~/there", "../a/b", "a/b/c", "name/"])
def test_a_folder_of_a_language_model_that_is_not_there(source: str) -> None:
    with pytest.raises(ConfigError, match=r"^model=.*: no such folder; give a Hugging Face model's folder"):
        check_model(source, ASKED)


def test_a_file_is_no_language_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"a file; give its folder"):
        check_model(str(tmp_path / "model.safetensors"), ASKED)
    check_model(str(tmp_path), ASKED)


@pytest.mark.parametrize("source", ["gpt2", "EleutherAI/gpt-j-6b"])
def test_a_name_of_the_hub_is_left_to_the_hub(source: str) -> None:
    check_model(source, ASKED)


@pytest.mark.parametrize("source", ["weights.pth", "/no/such/weights", "./weights", "runs/there/model.safetensors"])
def test_a_file_of_an_image_model_that_is_not_there(source: str) -> None:
    with pytest.raises(ConfigError, match=r"^model=.*: no such file or folder; give a .safetensors or .pth file"):
        check_model(source, TIMM)


def test_names_of_timm(tmp_path: Path) -> None:
    for name in (
        "deit_small_patch16_224",
        "deit_small_patch16_224.fb_in1k",
        "hf-hub:timm/deit_tiny_patch16_224.fb_in1k",
    ):
        check_model(name, TIMM)
    check_model(str(tmp_path), TIMM)  # a run
    with pytest.raises(ConfigError, match=r"nor a model that timm knows; nearest: .*deit_tiny_patch16_224"):
        check_model("deit_tiny_patch16_225", TIMM)


def test_every_vision_transformer_of_timm_passes_and_no_convolutional_network() -> None:
    for name in timm.list_models():
        if inspect.signature(timm.model_entrypoint(name)).return_annotation is VisionTransformer:
            check_architecture("task.model.name", name)
    for name in ("beit_base_patch16_224", "swin_tiny_patch4_window7_224"):  # built, and trained if not compressed
        check_architecture("task.model.name", name)
    for name in ("resnet50", "convnext_tiny", "efficientnet_b0"):
        with pytest.raises(ConfigError, match=f"^task.model.name={name}: no vision transformer"):
            check_architecture("task.model.name", name)


def test_the_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model=/no/such/folder: no such folder"):
        compose("task=reasoning", "model=/no/such/folder")
    with pytest.raises(ConfigError, match=r"model=deit.pth: no such file"):
        compose("task=imagenet", "model=deit.pth")


@pytest.mark.slow
def test_it_is_refused_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys; from attnlab.cli import main; sys.argv[1:] = ['task=imagenet', 'model=/no/such.pth']; "
        "code = main(); sys.exit(code if not {'torch', 'timm', 'transformers'} & set(sys.modules) else 7)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
