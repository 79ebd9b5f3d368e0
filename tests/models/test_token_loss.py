"""The loss with the logits of some tokens at a time is the loss of all, forward and backward, with less memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from attnlab.attention import MHA
from attnlab.config.check import compose
from attnlab.models import T6, Decoder, TensorizedTransformer
from attnlab.models.language_model import LanguageModel
from attnlab.models.sequence import SequenceModel
from attnlab.models.token_loss import in_chunks, nats
from attnlab.tasks.base import Trains, task_of
from attnlab.tasks.memory import LiveTensors

V, D, B, T = 29, 16, 3, 7
SMALL = [
    "task.model.d_model=16", "task.attention_heads=2", "task.model.encoder.num_layers=1",
    "task.model.encoder.ffn_dim=8", "task.model.decoder.num_layers=1", "task.model.decoder.ffn_dim=8",
    "task.data.vocab_size=29", "hardware=cpu",
]  # fmt: skip
LINES: dict[str, Callable[..., LanguageModel]] = {
    "T6": lambda a: T6(V, D, a, num_layers=1, ffn_dim=8, output_init="default"),
    "tied": lambda a: Decoder(V, D, a, num_layers=1, ffn_dim=8),
    "untied": lambda a: Decoder(V, D, a, num_layers=1, ffn_dim=8, tied=False),
    "bias": lambda a: TensorizedTransformer(V, D, a, num_layers=1, ffn_dim=8),
    "adaptive": lambda a: TensorizedTransformer(V, D, a, num_layers=1, ffn_dim=8, cutoffs=[9, 20]),
}
SENTENCES = {
    "prefix": ["task=mustc", "attention=mla", "task.model.encoder.conv_channels=8"],
    "two embeddings": ["task=xsum", "attention=mla"],
    "cross": ["task=wmt16", "attention=mha"],
}


def same(model: nn.Module, loss: Callable[[], Tensor], tokens: int) -> None:
    """Value and gradients for every size of a chunk."""
    results = []
    for size in (None, 1, 5, tokens - 1, tokens, tokens + 1):
        model.loss_chunk = size  # type: ignore[assignment]
        model.zero_grad()
        value = loss()
        value.backward()
        results.append([value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) > 5
    for got in results[1:]:
        torch.testing.assert_close(got, results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LINES)
def test_a_language_model_s(name: str) -> None:
    torch.manual_seed(0)
    model = LINES[name](lambda layer: MHA(D, 2, head_dim=8)).double()
    tokens, targets, weights = torch.randint(V, (B, T)), torch.randint(V, (B, T)), torch.rand(B, T).double()
    same(model, lambda: (model.loss(tokens, targets) * weights).sum(), B * T)


@pytest.mark.parametrize("name", [x if x == "cross" else pytest.param(x, marks=pytest.mark.slow) for x in SENTENCES])
def test_a_sequence_to_text_model_s(name: str) -> None:
    torch.manual_seed(0)
    task = task_of(compose(*SENTENCES[name], *SMALL), Trains)
    model: Any = task.build().double().eval()
    assert isinstance(model, SequenceModel)
    rows = [9, 6, 4]
    width = task.cfg.task.model.encoder.get("num_mels")
    inputs = torch.randint(4, V, (B, 9)) if width is None else torch.randn(B, 9, width).double()
    text, targets = torch.randint(4, V, (B, T)), torch.randint(4, V, (B, T))
    targets[1, 4:] = 1
    got: list[Any] = []

    def loss() -> Tensor:
        got.append(model.token_losses(inputs, torch.tensor(rows), text, targets, 1, 0.1))
        return (got[-1].smoothed * torch.arange(1.0, T + 1)).sum()

    same(model, loss, B * T)
    logits = model(inputs, torch.tensor(rows), text)[0].flatten(0, 1)
    for smoothing, values in ((0.1, got[0].smoothed), (0.0, got[0].plain)):
        want = nn.functional.cross_entropy(
            logits, targets.flatten(), ignore_index=1, label_smoothing=smoothing, reduction="sum"
        )
        torch.testing.assert_close(values.sum(), want)
    for losses in got:
        assert torch.equal(losses.right.flatten(), logits.argmax(-1) == targets.flatten())
        torch.testing.assert_close(losses.plain, got[0].plain)


def test_the_logits_are_never_there_together() -> None:
    words, tokens, width = 4000, 512, 8
    matrix = torch.randn(words, width, requires_grad=True)
    peaks = {}
    for size in (None, 32):
        hidden = torch.randn(tokens, width, requires_grad=True)
        with LiveTensors() as alive:
            rows = hidden, torch.randint(words, (tokens,))
            (got,) = in_chunks(lambda h, t: (nats(h @ matrix.mT, t),), rows, size)
            got.sum().backward()
        matrix.grad = None
        peaks[size] = alive.peak
    logits = 4 * words * tokens
    assert peaks[None] > 2 * logits  # these and their gradients
    assert peaks[32] < 0.3 * logits


def test_a_task_sets_it() -> None:
    task: Any = task_of(compose(*SENTENCES["cross"], *SMALL), Trains)
    assert task.build().loss_chunk == 2**28 // V
    for size in (9, None):
        task.cfg = OmegaConf.merge(task.cfg, {"hardware": {"loss_chunk": size}})
        assert task.build().loss_chunk == size
