"""mode=describe knows a converted model's cache and parameters to the unit, from a folder that has sizes alone."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab.config.check import check
from attnlab.conversion import Calibration
from attnlab.conversion.base import target_of
from attnlab.conversion.layers import convert
from attnlab.errors import ConfigError
from attnlab.models import Decoder
from attnlab.models.build import count_parameters
from attnlab.modes import describe
from attnlab.pretrained import huggingface
from attnlab.run.loading import load
from attnlab.run.record import new
from tests.conversion.models import FAMILIES, decoder_of, reference, tokens

TEXT = 21  # positions of a cache, of two rows
KNOBS = [
    "convert=mla",
    "convert=mla convert.keep=0.5",
    "convert=mla convert.keep=0.3 convert.rotary=transmla",
    "convert=mla convert.keep=0.5 convert.layers=equal",
    "convert=mla convert.keep=0.5 convert.layers=same",
    "convert=mla convert.rope_dim=4 convert.latent_dim=7",
    "convert=mla convert.keep=0.5 convert.latent_dim=10",
    "convert=mtla",
    "convert=mtla convert.keep=0.45",
    "convert=mtla convert.keep=0.5 stride=4 convert.recent=3 convert.first=1",
    "convert=mtla convert.keep=0.45 convert.recent=null stride=3",
    "convert=mtla convert.keep=0.5 convert.layers=same",
    "convert=mtla convert.rope_dim=4 convert.latent_dim=6",
    "convert=tpa",
    "convert=tpa convert.contextual=true",
    "convert=tpa rank=2",
    "convert=gqa",
    "convert=gqa convert.groups=2",
]
SAME = "convert=mla convert.keep=0.5 convert.layers=same"
REFUSED = ("convert=tpa", "convert=mtla", "convert=gqa", "convert=mla convert.rope_dim=4", SAME)  # of some families
DESCRIBED = ("same", "the conversion chooses")


@cache
def original(name: str) -> tuple[dict[str, Any], Any]:
    model = reference(name)
    return huggingface.options_of(model), model


def bytes_of(decoder: Decoder) -> tuple[float, int]:
    """Bytes of cache of a token of a long text, and of two rows of TEXT positions that were really decoded."""
    caches = decoder.start(2, TEXT, dtype=torch.float32)
    for part in tokens(2, TEXT).split([1, 9, 11], 1):
        decoder.step(part, caches)
    assert caches[0].length == TEXT
    return 4 * sum(a.cache_elements_per_token for a in decoder.attentions), sum(one.nbytes for one in caches)


def compared(name: str, words: str, folder: Path) -> str:
    """Compare what is described with what a conversion makes -> "same", what is estimated, or why both refuse."""
    options, model = original(name)
    (folder / "config.json").write_text(json.dumps(options))
    shape = ("bench.batch=2", "bench.beam=1", "bench.prefix=0", f"bench.text={TEXT}", "task.data.window=16")
    arguments = ["task=wikitext2", "hardware=cpu", "mode=describe", f"model='{folder}'", *shape, *words.split()]
    if "convert=m" in words and "layers=" not in words:  # measured sizes are known after measuring
        arguments += ["convert.layers=budget"]
    arguments += ["task.score.prompt_tokens=8", "task.sampling.tokens=8", "task.score.sliding_stride=null"]
    cfg = check(arguments, load).jobs[0]
    record, target = new(cfg, "test"), target_of(cfg)
    assert target is not None
    try:
        describe.run(cfg, record, None)
    except ConfigError as error:
        with pytest.raises(ConfigError) as refused:
            convert(decoder_of(model), target, tokens(4, 16))
        assert str(refused.value) == str(error)
        return str(error)
    decoder = decoder_of(model)
    convert(decoder, target, tokens(target.calibration.tokens // 16, 16)[:8])
    per_token, total = bytes_of(decoder)
    assert total == record["kv_cache"]["bytes_predicted"]
    assert per_token == pytest.approx(record["kv_cache"]["bytes_per_token"], rel=1e-12)  # of a stride of 3: thirds
    described = record["parameters"]
    same = described | count_parameters(target.healing.freeze(decoder)) == described
    return "same" if same else described["estimated"]


def test_a_described_cache_is_the_converted_one(tmp_path: Path) -> None:
    assert Calibration().tokens >= 8 * 16
    assert compared("llama", "convert=mla convert.keep=0.45", tmp_path).startswith(DESCRIBED[1])
    assert compared("llama", "convert=mla convert.rope_dim=4", tmp_path) == "same"
    assert "has biases" in compared("qwen2", "convert=tpa", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_and_knob(name: str, tmp_path: Path) -> None:
    outcomes = {words: compared(name, words, tmp_path) for words in KNOBS}
    described = [words for words, outcome in outcomes.items() if outcome.startswith(DESCRIBED)]
    assert all(words in described or words.startswith(REFUSED) for words in KNOBS), outcomes
    assert len(described) >= (7 if "window" in name else 10 if name == "smollm3" else 13)
