"""hardware.gradient_checkpointing on the model of every task and on every mechanism: the same gradients."""

import copy

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from attnlab.config.build import CONF
from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.tasks.base import Trains, task_of
from attnlab.training.gradient_checkpointing import checkpoint_layers

TASKS = sorted({path.stem for path in (CONF / "task").glob("*.yaml")} - {"reasoning"})  # which trains nothing
MECHANISMS = sorted(path.stem for path in (CONF / "attention").glob("*.yaml"))
SIZES = {  # as far as a task has the key
    "task.model.d_model": 32, "task.attention_heads": 2, "task.attention_head_dim": 16, "task.model.num_layers": 2,
    "task.model.depth": 2, "task.model.encoder.num_layers": 2, "task.model.encoder.ffn_dim": 32,
    "task.model.encoder.conv_channels": 16, "task.model.decoder.num_layers": 2, "task.model.decoder.ffn_dim": 32,
    "task.data.vocab_size": 300, "task.data.ctc_vocab_size": 300, "task.data.window": 16,
    "task.score.sliding_stride": 8,
}  # fmt: skip
BATCH = {"max_frames": 60, "batch_size": 2}
QUICK = ("wikitext2-mtla",)


def small(task: str, *overrides: str) -> Trains:
    words = [f"task={task}", "hardware=cpu", *overrides]
    cfg = compose(*words)
    sizes = [f"{key}={size}" for key, size in SIZES.items() if OmegaConf.select(cfg, key) is not None]
    return task_of(compose(*words, *sizes), Trains)


def gradients(task: Trains, model: nn.Module) -> dict[str, Tensor]:
    """Of one batch, with the same dropout at every call."""
    loss = task.rehearsal(model.train(), BATCH[task.batch_key], torch.device("cpu"))
    torch.manual_seed(1)
    loss().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


CASES = [(task, "mtla") for task in TASKS] + [("wikitext2", name) for name in MECHANISMS if name != "mtla"]


@pytest.mark.parametrize(
    ("name", "attention"),
    [pytest.param(*x, marks=() if "-".join(x) in QUICK else pytest.mark.slow, id="-".join(x)) for x in CASES],
)
def test_gradients_are_the_same(name: str, attention: str) -> None:
    chosen = compose(f"task={name}").get("attention") is not None
    task = small(name, *([f"attention={attention}"] if chosen else []))
    torch.manual_seed(0)
    model = task.build()
    with torch.no_grad():
        for parameter in model.parameters():  # some begin with zeros, which no gradient passes
            parameter.add_(0.05 * torch.randn_like(parameter))
    again = copy.deepcopy(model)
    if name == "slurp":
        with pytest.raises(ConfigError, match="the model has BatchNorm .* would count each batch twice"):
            checkpoint_layers(again)
        return
    runs = 0

    def counted(*_: object) -> None:
        nonlocal runs
        runs += 1

    checkpoint_layers(again)
    stacks = [getattr(m, name, None) for m in again.modules() for name in ("layers", "blocks")]
    layers = list(dict.fromkeys(x for s in stacks if isinstance(s, nn.ModuleList | nn.Sequential) for x in s))
    inner = [next(m for m in layer.modules() if not list(m.children()) and list(m.parameters())) for layer in layers]
    for module in inner:
        module.register_forward_hook(counted)
    want, repeated = gradients(task, model), gradients(task, again)
    assert want.keys() == repeated.keys() and all(torch.equal(value, repeated[name]) for name, value in want.items())
    assert sum(bool(value.count_nonzero()) for value in want.values()) > len(want) // 2
    calls = runs
    with torch.no_grad():
        task.rehearsal(again, BATCH[task.batch_key], torch.device("cpu"))()
    assert calls >= 2 * (runs - calls) - 1 > 0, "layers are computed again in the backward pass, and there alone"
