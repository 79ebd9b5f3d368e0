"""Decoders of transformers as attnlab's: the same logits, with and without a cache, in both directions."""

from typing import Any

import pytest
import torch

from attnlab.errors import ConfigError
from attnlab.pretrained import decoder, huggingface
from tests.attention.mechanisms import error
from tests.conversion.models import FAMILIES, SIZES, YARN, decoder_of, reference, tokens

MORE: dict[str, dict[str, Any]] = {  # of kinds that FAMILIES has
    "smollm3-yarn": {**FAMILIES["smollm3"], "rope_parameters": YARN},
    "smollm3-window": {**FAMILIES["smollm3"], "use_sliding_window": True, "sliding_window": 5},
    "phi3-window": {**FAMILIES["phi3"], "sliding_window": 5},
}


@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
def test_the_same_logits_there_and_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, name, (MORE | FAMILIES)[name])
    model, ids = reference(name), tokens(2, 24)
    options = huggingface.options_of(model)
    converted = decoder_of(model)
    with torch.no_grad():
        want: torch.Tensor = model(ids).logits
        assert error(converted(ids), want) < 1e-5
        caches = converted.start(2, 24)
        stepwise = torch.cat([converted.step(part, caches) for part in ids.split([5, 1, 1, 17], 1)], 1)
        assert error(stepwise, want) < 1e-5
        back: Any = decoder.unread(converted, options, "tiny")
        assert error(back(ids).logits, want) < 1e-5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type dynamic"),
        ({"hidden_act": "mish"}, "the activation mish"),
        ({"model_type": "gptj"}, "gptj has attention and MLP side by side, which attnlab's decoder does not have"),
        ({"model_type": "phi"}, "phi has attention and MLP side by side"),
        ({"model_type": "olmo2"}, "olmo2 has norms after attention and MLP"),
        ({"model_type": "gemma3_text"}, "gemma3_text has norms after attention and MLP"),
        ({"model_type": "bert"}, "bert has attention to later positions"),
    ],
)
def test_unsupported_parts_are_named(change: dict[str, Any], reason: str) -> None:
    options = {"model_type": "llama", **SIZES, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    with pytest.raises(ConfigError, match=reason):
        decoder.nodes_of(options | change, "tiny")


def test_a_stored_table_keeps_its_precision() -> None:
    model = decoder_of(reference("yarn"))
    before = model.attentions[0].frequencies.clone()  # type: ignore[operator]
    model.to(torch.bfloat16)
    after = model.attentions[0].frequencies
    assert after.dtype == torch.float64 and torch.equal(after, before)  # type: ignore[arg-type]
