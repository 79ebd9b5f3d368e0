"""task.match=parameters: mechanisms with as many parameters as attention=mha."""

import pytest

from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.models.build import count_parameters, without_memory
from attnlab.run.identity import recipe
from attnlab.tasks.base import Trains, task_of

MATCH = "task.match=parameters"


def parameters(*overrides: str) -> int:
    with without_memory():
        return count_parameters(task_of(compose(*overrides), Trains).build())["total"]


@pytest.mark.parametrize(
    ("task", "attention"), [("task=wikitext2 scale=comparison", "attention=mtla"), ("task=mustc", "attention=mqa")]
)
def test_parameters_are_those_of_mha(task: str, attention: str) -> None:
    words = [*task.split(), attention]
    wanted = parameters(*task.split(), "attention=mha")
    assert parameters(*words, MATCH) == pytest.approx(wanted, rel=0.01)
    assert recipe(compose(*words, MATCH)) != recipe(compose(*words)) == recipe(compose(*words, "task.match=null"))


def test_a_width_that_cannot_be_chosen() -> None:
    with pytest.raises(ConfigError, match="the pretrained model decides the width"):
        compose("task=wikitext2", "convert=mla", MATCH)
    with pytest.raises(ConfigError, match=r"no task.model.ffn_dim gives the .* parameters of attention=mha"):
        compose("task=wikitext2", "attention=tpa", MATCH, "attention.num_heads=256")
