"""attention.pattern=[...]: which files a hybrid stack is made of, and what of them can be set."""

import pytest

from attnlab.config.check import compose
from attnlab.errors import ConfigError


def test_a_pattern_alone_is_a_hybrid_stack_of_the_files_values() -> None:
    cfg = compose("task=wikitext2", "attention.pattern=[mtla,mtla,mha]")
    assert cfg.choices.attention == "hybrid" and list(cfg.attention.pattern) == ["mtla", "mtla", "mha"]
    for name in ("mtla", "mha"):
        assert cfg.attention.mechanisms[name] == compose("task=wikitext2", f"attention={name}").attention
    assert set(cfg.attention.mechanisms) == {"mtla", "mha"}


def test_knobs_and_keys_of_one_mechanism() -> None:
    cfg = compose(
        "task=wikitext2", "attention=hybrid", "attention.pattern=[mtla,gqa]", "stride=3",
        "attention.mechanisms.gqa.num_kv_heads=1", "+attention.mechanisms.gqa.qk_norm=true",
    )  # fmt: skip
    assert cfg.attention.mechanisms.mtla.stride == 3 == cfg.stride
    assert cfg.attention.mechanisms.gqa.num_kv_heads == 1 and cfg.attention.mechanisms.gqa.qk_norm


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("attention.pattern=[mtla,mhaa]", "attention.pattern: mhaa is not a mechanism; nearest: mha"),
        ("attention.pattern=[hybrid]", "attention.pattern: hybrid is not a mechanism"),
        ("attention.pattern=[]", "attention.pattern=[]: expected a list of mechanisms, such as [mtla,mtla,mha]"),
        ("attention.pattern=mha", "attention.pattern=mha: expected a list of mechanisms"),
        ("attention=mha attention.pattern=[mtla]", "attention.pattern: no such key"),
        ("attention=hybrid attention.mechanisms.gqa.dropout=0.0", "attention.mechanisms.gqa.dropout: no such key"),
        ("attention.pattern=[mha,gqa] stride=2", "attention=hybrid has no stride"),
        ("attention.pattern=[mtla,mha] attention.mechanisms.mtla.stride=two", "attention.mechanisms.mtla.stride=two"),
    ],
)
def test_what_is_wrong_is_one_line(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose("task=wikitext2", *overrides.split())
    assert message in str(error.value) and "\n" not in str(error.value)
