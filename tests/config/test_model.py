"""A model that is not there is refused from the command line alone."""

import inspect
from pathlib import Path

import pytest
import timm
from timm.models import VisionTransformer

from attnlab.config.model import TIMM, check_architecture, check_model
from attnlab.errors import ConfigError

ASKED = "attnlab.tasks.reasoning.model.AskedModel"


ABSENT = {  # by what reads it: sources that are not there, and what the error asks for
    ASKED: (
        ["/no/such/folder", "./there", "~/there", "../a/b", "a/b/c", "name/"],
        "folder; give a Hugging Face model's",
    ),
    TIMM: (
        ["weights.pth", "/no/such/weights", "./weights", "runs/there/model.safetensors"],
        "file or folder; give a .safetensors or .pth file",
    ),
}


@pytest.mark.parametrize("reader", ABSENT)
def test_a_model_that_is_not_there(reader: str) -> None:
    sources, message = ABSENT[reader]
    for source in sources:
        with pytest.raises(ConfigError, match=f"^model=.*: no such {message}"):
            check_model(source, reader)


def test_a_language_model_is_a_folder_or_left_to_the_hub(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"a file; give its folder"):
        check_model(str(tmp_path / "model.safetensors"), ASKED)
    for source in (str(tmp_path), "gpt2", "EleutherAI/gpt-j-6b"):
        check_model(source, ASKED)


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
