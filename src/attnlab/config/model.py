"""What `model=` and `checkpoint=` name, checked without importing torch, timm or transformers.

A name of the Hugging Face hub cannot be checked here: whether it is there is known when the hub is asked.
"""

import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from attnlab.config.nearest import nearest
from attnlab.errors import ConfigError

SAMPLE = "sample"  # in place of a decoder's folder or name: a small model, trained on the task's own text
TIMM = "attnlab.pretrained.timm.VisionTransformer"  # the `_target_` whose weights are files, runs or names of timm
SAVED = (b"PK\x03\x04", b"\x80\x02")  # how files of torch.save begin, today and before version 1.6
OF_THE_MODEL = ("attention", "task.model", "task.data.vocab_size", "task.data.vocabulary")  # nodes that it decides
FILES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")  # endings of weight files


def check_model(source: str, target: str) -> None:
    """Refuse a path that does not exist, and for image models a name that timm does not have (ConfigError)."""
    path = Path(source).expanduser()
    if target == TIMM:
        if path.exists():
            if not path.is_dir():
                check_weights("model", source)
            return
        if path.suffix in FILES or _only_a_path(source):
            raise ConfigError(f"model={source}: no such file or folder; give a .safetensors or .pth file, or a run")
        check_architecture("model", source)
    elif path.is_file():
        raise ConfigError(f"model={source}: a file; give its folder, with config.json, tokenizer and *.safetensors")
    elif not path.exists() and (_only_a_path(source) or source.count("/") > 1 or source.endswith("/")):
        raise ConfigError(f"model={source}: no such folder; give a Hugging Face model's folder, or a name of the hub")


def check_weights(key: str, source: str) -> None:
    """Refuse what is no file of weights, by its first bytes: reading it takes the import of torch.

    Raises:
        ConfigError: there is no such file, or it is of another kind.
    """
    path = Path(source).expanduser()
    expected = "expected a .safetensors file, or a .ckpt or .pth file of torch.save"
    if not path.is_file():
        raise ConfigError(f"{key}={source}: {'not a file' if path.exists() else 'no such file'}; {expected}")
    with path.open("rb") as file:
        head = file.read(9)
    tensors = head[8:] == b"{" and int.from_bytes(head[:8], "little") <= path.stat().st_size - 8
    if not tensors and not head.startswith(SAVED):
        raise ConfigError(f"{key}={source}: holds no weights, or is damaged; {expected}")


def _only_a_path(source: str) -> bool:
    """Whether the form is that of a path alone, which no name of a hub has."""
    return Path(source).is_absolute() or source.startswith((".", "~"))


def check_architecture(key: str, name: str) -> None:
    """Refuse a name whose architecture timm does not have, or whose source in timm neither takes a size of images nor
    builds a VisionTransformer. ConfigError names the nearest name.
    """
    architecture = name.partition(".")[0]
    if ":" in name or "/" in name:  # hf-hub:owner/model
        return
    known, source = _timm("models")
    if known and architecture not in known and not re.search(rf"""['"]{re.escape(architecture)}['"]""", source):
        what = "neither a file or folder, nor a model that timm knows" if key == "model" else "timm has no such model"
        raise ConfigError(f"{key}={name}: {what}{nearest(architecture, known)}")
    if architecture in known and not re.search(r"img_size|\bVisionTransformer\b", known[architecture]):
        raise ConfigError(f"{key}={name}: no vision transformer, for which task=imagenet is made")


def check_optimizer(name: str) -> None:
    """Refuse an optimizer that timm does not have. ConfigError names the nearest name."""
    source = _timm("optim")[1]
    known = re.findall(r"""\bname=['"](\w+)['"]""", source)
    if known and not re.search(rf"""['"]{re.escape(name.lower().removeprefix("lookahead_"))}['"]""", source):
        raise ConfigError(f"task.optimizer.opt={name}: timm has no such optimizer{nearest(name, known)}")


@lru_cache
def _timm(part: str) -> tuple[dict[str, str], str]:
    """The models that a part of timm registers, with the source of their files, and all of its source.

    Importing timm would take seconds.
    """
    spec = find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        return {}, ""
    files = sorted(Path(spec.submodule_search_locations[0], part).glob("*.py"))
    sources = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    models = [(re.findall(r"^@register_model\s+def (\w+)", source, re.MULTILINE), source) for source in sources]
    return {name: source for names, source in models for name in names}, "\n".join(sources)
