"""mode=describe: a table on a terminal, JSON in a pipe."""

import json
import sys

import pytest

from attnlab.config.check import compose
from attnlab.run import job


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_gets_a_table(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert job.run(compose("mode=describe"), "command", None) == 0
    said = capsys.readouterr().out
    if not terminal:
        assert json.loads(said)["parameters"]["total"] == 2374716
        return
    assert (
        "mustc · mtla · sample" in said
        and "2,374,716" in said
        and "per token and layer" in said
        and "elements" not in said
        and "4,900,608 bytes" in said
    )
    assert "not run" not in said and "JSON" in said
