"""Heat maps of recall over length and depth, from records with a needle in a haystack."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from attnlab.errors import DataError
from attnlab.report import needle
from attnlab.report.command import main
from attnlab.run.store import collect

pytestmark = pytest.mark.usefixtures("unrendered")
LENGTHS, DEPTHS = (128, 2048), (0.0, 0.5, 1.0)


def measured(right: float, gain: float) -> dict[str, Any]:
    """At half the depth all is half as good."""
    good = {(length, depth): 1 / (1 + (depth == 0.5)) for length in LENGTHS for depth in DEPTHS}
    cells = [{"length": n, "depth": d, "accuracy": right * x, "gain": gain * x} for (n, d), x in good.items()]
    about = {"accuracy": right * 5 / 6, "gain": gain * 5 / 6, "trials": 16, "answer_tokens": 6.0, "asks": "words"}
    return about | {"seed": 1, "cells": cells, "without": []}


def write(template: dict[str, Any], place: Path, seed: int = 1, **settings: Any) -> dict[str, Any]:
    """A record of a conversion that was not healed, with recall 1 and then 0.5."""
    record = copy.deepcopy(template) | {"seed": seed}
    target = "mtla" if "stride" in settings else "mla"
    states = {"original": (3.5, 512.0, measured(1.0, 2.0)), "converted": (3.6 + seed / 10, 256.0, measured(0.5, 1.0))}
    points = {
        state: {"perplexity": perplexity, "cache_bytes_per_token": cache, "needle": haystacks}
        for state, (perplexity, cache, haystacks) in states.items()
    }
    record["conversion"] = {
        "target": target,
        "settings": {"keep": 0.5, "rotary": "score"} | settings,
        "points": points | {"healed": "not run"},
    }
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(record))
    return record


def test_runs_side_by_side(template: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds are saved line; conversions that differ in a setting are two; a run without a needle is left out."""
    write(template, tmp_path / "runs" / "a.json", 1)
    write(template, tmp_path / "runs" / "b.json", 2)
    write(template, tmp_path / "runs" / "c.json", 1, rotary="uniform")
    scored = copy.deepcopy(template)
    (tmp_path / "runs" / "without.json").write_text(json.dumps(scored))
    scored["quality"] |= {"perplexity": 4.0, "needle": measured(0.25, 0.5)}
    (tmp_path / "runs" / "scored.json").write_text(json.dumps(scored))
    haystacks = [saved for saved in collect([tmp_path / "runs"]) if saved.path.stem != "without"]
    assert len(haystacks) == 4
    names = ["mla keep=0.5 rotary=score", "mla keep=0.5 rotary=uniform", "mha"]
    grid = needle.table(haystacks)
    rows = {(row[0], row[1]): row[2:] for row in grid.rows}
    assert rows[names[0], "converted"][0] == "3.750" and rows[names[1], "converted"][0] == "3.700"
    assert rows["mha", "scored"] == ["4.000", "not run", "20.8", "0.417", "20.8", "20.8"]
    page = needle.draw(needle.points(haystacks, "gain"), needle.WHAT["gain"][1])
    titles = [axes.get_title() for axes in page.axes if axes.get_title()]
    assert len(titles) == 9 and titles.count("original") == 2 and "mha: scored" in titles
    shown = next(axes for axes in page.axes if axes.get_title() == f"{names[0]}: converted")
    assert [text.get_text() for text in shown.texts] == ["1.00", "1.00", "0.50", "0.50", "1.00", "1.00"]
    assert [text.get_text() for text in shown.get_yticklabels()] == ["0", "0.5", "1"]
    assert main(["needle", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert {Path(line).name for line in capsys.readouterr().out.split()} == {
        p.name for p in (tmp_path / "out").iterdir()
    }
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.json").write_text(json.dumps(template))
    with pytest.raises(DataError, match="task.score.needle.lengths"):
        main(["needle", str(tmp_path / "empty")])


@pytest.mark.parametrize("damage", [{"cells": [{"length": "x"}]}, {"accuracy": None, "cells": 5}, {"trials": 16}])
def test_a_damaged_record_is_named(template: dict[str, Any], tmp_path: Path, damage: dict[str, Any]) -> None:
    write(template, tmp_path / "good.json", 1)
    record = write(template, tmp_path / "bad.json", 2)
    record["conversion"]["points"]["converted"]["needle"] = damage
    (tmp_path / "bad.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"^\S*bad\.json: damaged"):
        main(["needle", str(tmp_path), "--out", str(tmp_path / "out")])
