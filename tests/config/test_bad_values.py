"""Values that libraries would refuse late, and files of a user that are not a configuration."""

import re
from pathlib import Path

import pytest
import yaml

from attnlab.config.build import CONF
from attnlab.config.check import check
from attnlab.config.nodes import fits
from attnlab.config.rules import check_weights
from attnlab.config.schema import signature
from attnlab.errors import ConfigError


def test_a_file_of_weights_has_an_ending_of_one(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.ckpt", "c.pth"):
        (tmp_path / name).touch()
        check_weights("checkpoint", str(tmp_path / name))
    for name, message in (("d.ckpt", "no such file"), (".", "not a file"), ("text", "expected a file of weights")):
        (tmp_path / "text").touch()
        with pytest.raises(ConfigError, match=message):
            check_weights("checkpoint", str(tmp_path / name))


FILES = [  # a file in --config-dir, its content, what the error says
    ("attention/mine", b"", r"mine\.yaml: expected keys and values"),
    ("attention/list", b"- 1\n", r"list\.yaml: expected keys and values, found list"),
    ("attention/latin", "a: é\n".encode("latin-1"), r"latin\.yaml: not YAML in UTF-8"),
    ("attention/bad", b"a: [1\nb: 2\n", r"bad\.yaml: not YAML in UTF-8 .* line 2"),
    ("attention/self", b"defaults: [self]\n", "attention=self: files build on each other; look at their defaults"),
    ("attention/mha", b"_target_: mine.MHA\n", r"attention/mha\.yaml is a built-in file"),
    ("hydra/job_logging/default", b"version: 1\n", r"default\.yaml is a built-in file"),
]
CHANGES = [  # of conf/attention/mha.yaml, and what the error says
    (
        {"num_kv_head": 2},
        "attention.num_kv_head: attnlab.attention.MHA has no parameter 'num_kv_head'; nearest: num_kv_heads",
    ),
    ({"num_kv_heads": "???"}, "attention.num_kv_heads has no default"),
    ({"_target_": "attnlab.attention.MHAA"}, "no such class; nearest: attnlab.attention.MHA"),
    ({"_target_": "torch.nn.Linearr"}, "attention._target_=torch.nn.Linearr: no such class; check its name"),
    ({"head_dim": "${task.modle.d_model}"}, "attention.head_dim = ${task.modle.d_model}: Interpolation key"),
]
OVERLAYS = {  # text of experiment/mine.yaml: how the error begins
    "task:\n  train:\n    max_step: 3": "task.train.max_step: attnlab.config.settings.Train has no parameter",
    "seeed: 3": "seeed: attnlab.config.settings.Root has no parameter 'seeed'; nearest: seed",
    "mode: 3": "mode=3: no such mode",
    "stride: 100000": "attention.stride=100000: expected int >= 1 and <= 1024",
    "task:\n  train:\n    clip: high": "task.train.clip=high: expected float >= 0",
    "task:\n  model:\n    encoder: 3": "task.model.encoder",
}
MHA = yaml.safe_load((CONF / "attention" / "mha.yaml").read_text())
FILES += [("attention/mine", yaml.safe_dump(MHA | change).encode(), re.escape(message)) for change, message in CHANGES]
FILES += [
    ("experiment/mine", f"# @package _global_\n{text}\n".encode(), f"^{re.escape(message)}")
    for text, message in OVERLAYS.items()
]


@pytest.mark.parametrize(("name", "content", "message"), FILES)
def test_a_wrong_file_is_found_as_a_wrong_command_line_is(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.yaml"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    group, _, option = name.rpartition("/")
    with pytest.raises(ConfigError, match=message) as caught:
        check([f"--config-dir={tmp_path}", "seed=2" if "hydra" in group else f"{group}={option}"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mode=train dtype=bfloat16", "dtype= is read by mode=export, not by mode=train"),
        ("mode=export format=safetensors dtype=bfloat16", "dtype=bfloat16 is read by mode=export of a language model"),
        ("mode=export task=mustc dtype=float16", "dtype=float16 is read by mode=export of a language model"),
        ("mode=export dtype=int8", "dtype=int8: expected"),
        ("mode=export format=vllm prove.requests=[1,8]", "prove.requests= needs prove.python="),
        ("mode=export prove.python=/usr/bin/python3", "prove.python= is read by mode=export format=vllm"),
        ("mode=export format=vllm prove.requests=[0]", "prove.requests"),
        ("mode=export format=vllm prove.requests=8", "prove.requests=8: expected"),
        ("mode=export format=vllm prove.length=0", "prove.length=0: expected"),
    ],
)
def test_what_an_export_does_not_read(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        check(["task=wikitext2", *words.split()] if "task=" not in words else words.split())


SIZE = re.compile(r"(^|_)(d_model|dim|rank|layers|heads|groups|window|size|length|context|text|width|channels|mels)$")
TARGETS = {
    target for file in CONF.rglob("*.yaml") for target in re.findall(r"_target_: (attnlab\.\S+)", file.read_text())
}


@pytest.mark.parametrize("target", sorted({*TARGETS, "attnlab.config.settings.Root", "attnlab.config.settings.Task"}))
def test_every_size_has_an_upper_bound(target: str) -> None:
    """A typing error such as `num_layers=100000000` would take minutes, or all of the memory, before an error."""
    sizes = {key: annotation for key, annotation in signature(target).parameters.items() if SIZE.search(key)}
    for key, annotation in sizes.items():
        if annotation is not None and not fits(annotation, "text") and key not in ("batch_size", "eval_batch_size"):
            assert not fits(annotation, 10**8), f"{target}({key}=): expected Size, Layers or another upper bound"
