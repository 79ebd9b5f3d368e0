"""Hybrid stacks: mechanisms repeat over the layers of every model that takes one, and every count follows."""

from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from attnlab.attention import MHA, MTLA, SlidingWindow
from attnlab.config.check import compose
from attnlab.models.build import build_model, count_parameters, without_memory
from tests.attention.mechanisms import error

PATTERN = "attention.pattern=[mtla,mtla,mha]"
SIZES = {
    "mustc": ("task.model.d_model=32", "task.model.decoder.num_layers=4", "task.model.decoder.ffn_dim=24"),
    "wmt16": ("task.model.d_model=32", "task.model.decoder.num_layers=4", "task.model.decoder.ffn_dim=24"),
    "wikitext2": ("task.model.d_model=32", "task.model.num_layers=4", "task.model.ffn_dim=24"),
    "ptb": ("task.model.d_model=32", "task.model.num_layers=4", "task.model.ffn_dim=24"),
}
EACH_TASK = ["wmt16", *(pytest.param(task, marks=pytest.mark.slow) for task in SIZES if task != "wmt16")]
every_task = pytest.mark.parametrize("task", EACH_TASK)


def config(task: str, *overrides: str) -> DictConfig:
    extra = ("task.model.attention_in=both", "task.model.encoder.num_layers=4") if task == "wmt16" else ()
    return compose(f"task={task}", "task.attention_heads=4", *SIZES[task], *extra, *overrides)


def decoder_of(model: Any) -> Any:
    return getattr(model, "decoder", model)


@every_task
def test_layers_follow_the_pattern_and_counts_follow_the_layers(task: str) -> None:
    hybrid, mtla, mha = (config(task, choice) for choice in (PATTERN, "attention=mtla", "attention=mha"))
    with without_memory():
        models = [build_model(cfg, vocab_size=40) for cfg in (hybrid, mtla, mha)]
    stack, only_mtla, only_mha = (decoder_of(model).attentions for model in models)
    kinds = [MTLA, MTLA, MHA, MTLA]
    assert [type(attention) for attention in stack] == kinds
    pairs = [only_mtla[0] if kind is MTLA else only_mha[0] for kind in kinds]
    for layer, alone in zip(stack, pairs, strict=True):
        assert count_parameters(layer) == count_parameters(alone)
        assert layer.cache_elements(6, 9, 5, 2) == alone.cache_elements(6, 9, 5, 2)
        assert layer.multiply_adds(14, 5) == alone.multiply_adds(14, 5)
    inside = [count_parameters(model)["attention"] for model in models]
    if task == "wmt16":
        assert [type(layer.attention) for layer in models[0].encoder.layers] == kinds
    assert inside[0] == inside[1] * 3 // 4 + inside[2] // 4


def test_steps_of_a_language_model_equal_its_parallel_form() -> None:
    model = build_model(config("wikitext2", "attention.pattern=[mtla,sliding_window,tpa]"), vocab_size=40)
    model.double().eval()
    assert isinstance(model.attentions[1], SlidingWindow)
    for attention in model.attentions:  # T6 begins with blocks that add nothing
        torch.nn.init.normal_(attention.out.weight)
    tokens = torch.randint(40, (2, 9))
    caches = model.start(2, 9)
    with torch.no_grad():
        steps = torch.cat([model.step(piece, caches) for piece in tokens.split([3, 1, 1, 4], 1)], 1)
    assert error(steps, model(tokens)) < 1e-11
    bytes_predicted = 8 * sum(a.cache_elements(2, 9) for a in model.attentions)
    assert sum(cache.nbytes for cache in caches) == bytes_predicted
