"""Differences of full-rank conversions from transformers: families of decoders x targets, in float64 throughout.

python -m tests.conversion.exactness experiments/convert
"""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnlab.attention import MHA
from attnlab.conversion import Conversion, ToMLA, ToMTLA, ToTPA
from attnlab.conversion.layers import convert
from attnlab.conversion.statistics import frequencies_of
from attnlab.errors import ConfigError
from attnlab.models import Decoder
from attnlab.report.table import Grid
from tests.attention.mechanisms import error
from tests.conversion.models import FAMILIES, decoder_of, reference, tokens

BOUND = 1e-12
NAMES = {
    "llama": "Llama",
    "llama3": "Llama, llama3 scaling",
    "llama-biased": "Llama with biases",
    "smollm": "SmolLM (9 heads, tied)",
    "yarn": "Llama, YaRN",
    "linear": "Llama, linear scaling",
    "mistral": "Mistral",
    "mistral-window": "Mistral, sliding window",
    "qwen2": "Qwen2",
    "qwen2-window": "Qwen2, sliding windows",
    "qwen3": "Qwen3",
    "gpt2": "GPT-2",
    "smollm3": "SmolLM3",
    "phi3": "Phi-3",
}


class Wide(TorchFunctionMode):
    """Replaces float32 by float64 in transformers: norms, rotary tables, softmax."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        if options.get("dtype") is torch.float32:
            options["dtype"] = torch.float64
        if func is torch.Tensor.to:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **options)


class WholeMLA(ToMLA):
    """A cache as large as the original's, which the command refuses.

    `sizes` is no wider than the layer's inputs for the check of the plan; the latent has what the rotary keys leave.
    """

    name = "mla"

    def budget(self, attention: MHA) -> int:
        return 2 * attention.num_kv_heads * attention.head_dim

    def sizes(self, attention: MHA, total: int | None = None) -> tuple[int, int]:
        rope = attention.num_kv_heads * attention.turned
        return rope, min(self.budget(attention) - rope, attention.d_model)


class WholeMTLA(WholeMLA, ToMTLA):
    """The same, then slots of one position."""

    name = "mtla"


TARGETS: dict[str, Callable[[MHA], Conversion]] = {
    "MLA": lambda _: WholeMLA(layers="equal", refit=False),
    "MTLA, s = 1": lambda _: WholeMTLA(layers="equal", refit=False, stride=1, recent=None),
    "MTLA, s = 1, window": lambda _: WholeMTLA(layers="equal", refit=False, stride=1, recent=3, first=1),
    "TPA": lambda attention: ToTPA(rank=attention.num_kv_heads),
}


@torch.no_grad()
def logits(name: str, ids: Tensor) -> tuple[Tensor, Decoder]:
    """The logits of transformers for ids (B, T), and attnlab's decoder with the same weights."""
    model: Any = reference(name, torch.float64)
    decoder = decoder_of(model)
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    plain = next((a for a in decoder.attentions if isinstance(a, MHA) and a.turned), None)
    if rotary is not None and plain is not None:
        rotary.inv_freq = frequencies_of(plain)  # those of transformers are computed in float32
    with Wide():
        return model(ids).logits, decoder


def row(name: str, targets: Mapping[str, Callable[[MHA], Conversion]] = TARGETS) -> list[float | str]:
    """Relative errors of the logits of a family: unconverted, then of each target, or the reason of its refusal."""
    ids = tokens(2, 24)
    want, decoder = logits(name, ids)
    values: list[float | str] = [error(decoder(ids), want)]
    for make in targets.values():
        changed = copy.deepcopy(decoder)
        try:
            attention = changed.attentions[0]
            assert isinstance(attention, MHA)
            convert(changed, make(attention), tokens(4, 32, seed=3))
            with torch.no_grad():
                values.append(error(changed(ids), want))
        except ConfigError as refused:
            values.append(str(refused))
    return values


def table(names: Sequence[str] = tuple(FAMILIES)) -> Grid:
    """The matrix of these families."""
    grid = Grid("Exactness of conversions at full rank", ["Family", "As it is", *TARGETS])
    reasons: list[str] = []
    for name in names:
        cells = []
        for outcome in row(name):
            if isinstance(outcome, str):
                if outcome not in reasons:
                    reasons.append(outcome)
                cells.append(f"refused ({reasons.index(outcome) + 1})")
            else:
                cells.append(f"{outcome:.0e}")
        grid.rows.append([NAMES[name], *cells])
    grid.notes.append(
        "Relative norm of the difference of logits from transformers' own, of random weights in which every bias and "
        "norm counts; both sides compute in float64 throughout. MLA has all rotary components and all content (r + "
        "d_r = 2 G D, a cache as large as the original's; for GPT-2, which has no rotary keys, r = 2 d). Bound of the "
        "test: 1e-12."
    )
    grid.notes += [f"({number}) {reason}" for number, reason in enumerate(reasons, 1)]
    return grid


if __name__ == "__main__":
    for path in table().write(Path(sys.argv[1]) / "exactness", "md", "csv"):
        print(path)
