"""Help and lists: every option of every group is named, with what it is."""

import re

import pytest

from attnlab.config.build import CONF, GROUPS
from attnlab.config.check import check
from attnlab.config.compose import Composer
from attnlab.config.listing import EXAMPLES, KEYS, SHORT, about, help_text, listing
from attnlab.errors import ConfigError


def test_help_has_every_option_of_the_groups_people_choose_from() -> None:
    text = help_text("attnlab")
    for group in SHORT:
        assert all(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text) for name in Composer().options(group)), (
            group
        )
    assert all(f"  {key} " in text for key in KEYS)


def test_every_option_says_what_it_is() -> None:
    for group in GROUPS:
        for name in Composer().options(group):
            assert about(CONF / group / f"{name}.yaml"), f"conf/{group}/{name}.yaml begins with no comment"


def test_lists() -> None:
    assert [line.split()[0] for line in listing([]).splitlines()] == list(GROUPS)
    text = listing(["attention", "experiment"])
    assert re.search(r"^  mtla +Multi-head temporal latent attention", text, re.MULTILINE)
    assert re.search(r"^  mtla/table3 +MTLA paper, table 3", text, re.MULTILINE)
    with pytest.raises(ConfigError, match="list atention: no such group; nearest: attention"):
        listing(["atention"])


@pytest.mark.slow
def test_the_examples_of_the_help_are_right() -> None:
    for _, command in EXAMPLES:
        if "checkpoint=" not in command:
            assert check(command.split()).jobs
