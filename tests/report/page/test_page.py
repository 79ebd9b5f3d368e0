"""`attnlab report` without a browser: what is gathered, and that everything is text."""

import base64
import hashlib
import json
import re
import shlex
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from attnlab import cli
from attnlab.errors import ConfigError
from attnlab.report import command, sweep
from tests.report.page.conftest import ROOT, Write

pytest.importorskip("bokeh")
pytest.importorskip("itables")

from attnlab.report.page.render import POINTS, gather, groups, render, samples

HOSTILE = "<script>alert(1)</script>"
IMAGE = '"><img src=x onerror=alert(1)>'


class Elements(HTMLParser):
    """The tags of a page, and the texts of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.scripts += [""] * (tag == "script")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def test_runs_of_every_kind(write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "outputs"
    long = [(step, 4 / step) for step in range(1, 1001)]
    write(place / "long", long, started="2025")
    write(place / "good", [(50, 4.0), (100, 2.0)], [("eins", "one", "one")] * 9, started="2026-03")
    write(place / "dead", started="2026-02", status="running")
    write(place / "failed", started="2026-01", status="failed", error="disk\nfull", quality={})
    write(place / "newer", schema=3)
    short = write(place / "short", predictions=[("a", "b", "c")], started="2024")
    (short / "predictions.tsv").write_text("id\tsource\n1\ta\n")
    runs = {Path(run.name).name: run for run in gather([place])}
    statuses = {"good": "finished", "long": "finished", "dead": "interrupted", "failed": "failed"}  # the newest first
    assert {name: run.status for name, run in runs.items()} == statuses and list(runs) == list(statuses)
    assert runs["good"].curves == {"loss": [(50, 4.0), (100, 2.0)], "val_loss": [(50, 2.0), (100, 1.0)]}
    assert len(runs["good"].samples) == 4 and (runs["good"].metric, runs["good"].quality) == ("bleu", 95.33)
    assert runs["dead"].error == "its process is gone" and runs["failed"].error == "disk full"
    assert runs["failed"].quality is None
    thinned = runs["long"].curves["loss"]
    assert len(thinned) == POINTS and (thinned[0], thinned[-1]) == (long[0], long[-1]) and set(thinned) < set(long)
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 2 and "newer/record.json: skipped" in named[0] and "short/record.json: left out" in named[1]
    page = Elements(render(list(runs.values()), [place])).text
    assert "1 interrupted" in page and "its process is gone" in page


def test_runs_of_a_sweep_are_told_apart(write: Write, tmp_path: Path) -> None:
    for number, (rank, lr, updates) in enumerate(((16, 1, 20), (32, 1, 20), (32, 2, 20), (32, 2, 90))):
        words = f"attnlab attention=mla rank={rank} task.optimizer.lr={lr} seed={number} hydra.run.dir=x"
        values = {"rank": rank, "seed": number, "training__steps": updates, "attention": "mla", "command": words}
        write(tmp_path / f"{number}", **values)
    runs = sorted(gather([tmp_path]), key=lambda run: run.name)
    assert [run.mechanism for run in runs] == ["mla r=16", "mla r=32 lr=1", "mla r=32 lr=2", "mla r=32 lr=2"]
    page = Elements(render(runs, [tmp_path])).text
    assert page.index("Updates") < page.index("Task") < page.index("Status")  # columns that differ come first
    assert page.count("20 ≠") == 3 and "budgets are unequal" in page
    assert "≠" not in Elements(render(runs[:3], [tmp_path])).text


def test_names_that_are_no_text(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux takes any bytes as the name of a file: they are shown as JSON writes them."""
    place = tmp_path / "no\udcfftext"
    write(place / "a\udcffb", corpus="x\udcff", mode="m\udc80", command="c\udcff", tags=["t\udcff"])
    monkeypatch.chdir(tmp_path)
    assert command.main([str(place), "-o", "page.html"]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(text in page for text in (r"a\udcffb", r"x\udcff", r"m\udc80", r"t\udcff"))


@pytest.mark.filterwarnings("error")
def test_losses_that_cannot_be_drawn(write: Write, tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    write(tmp_path / "nan", [(1, nan)])
    write(tmp_path / "gap", [(1, 3.0), (2, inf), (4, 2.0)])
    runs = {Path(run.name).name: run for run in gather([tmp_path])}
    assert runs["nan"].curves == {}
    assert str(runs["gap"].curves["loss"]) == "[(1, 3.0), (2, nan), (4, 2.0)]"
    assert render(list(runs.values()), [tmp_path])


def test_the_committed_records_make_a_page() -> None:
    """Most lie under other names than record.json; none has predictions."""
    runs = gather([ROOT / "experiments"])
    assert len(runs) > 60 and not any(run.samples or run.status == "broken" for run in runs)
    assert {"recall", "mustc"} <= {run.record["task"] for run in runs if run.curves}
    named = {group.name: group for group in groups(runs)}
    trained = named["wikitext2 · perplexity · WikiText-2, vocabulary 4096 (85)"]
    assert sweep.SIZES[1] in trained.measures
    assert "wikitext2 · perplexity · WikiText-2, vocabulary 257 (6)" in named  # of bytes: not to be compared with it
    page = render(runs, [ROOT / "experiments"])
    assert 1_500_000 < len(page.encode()) < 2_100_000 + 8_000 * len(runs)  # libraries, and what a run takes
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", re.sub(r"(?s)<script.*?</script>", "", page))


def test_everything_is_text(write: Write, tmp_path: Path) -> None:
    texts = dict.fromkeys(("attention", "task", "corpus", "command", "scale", "experiment"), HOSTILE)
    write(
        tmp_path / f"{IMAGE.replace('/', '')}",
        [(1, 2.0)],
        [(HOSTILE, IMAGE, f"{HOSTILE} {IMAGE}")],
        **texts,
        tags=[HOSTILE, IMAGE],
        quality={HOSTILE: 1.0},
        environment__device=HOSTILE,
        environment__git=IMAGE,
        training__left_out={HOSTILE: 3},
    )
    write(tmp_path / "failed", status="failed", error=HOSTILE, attention=IMAGE)
    runs = gather([tmp_path])
    page = render(runs, [tmp_path])
    elements = Elements(page)
    kinds = [attributes.get("type") for tag, attributes in elements.tags if tag == "script"]
    assert kinds == ["application/json", "text/plain", None, "module"]
    assert not any(tag == "img" or "onerror" in attributes for tag, attributes in elements.tags)
    assert elements.text.count(HOSTILE) >= 12 and IMAGE in elements.text
    assert "<" not in elements.scripts[0]  # nothing in the data can end its element
    data = json.loads(elements.scripts[0])
    assert any(group["name"].startswith(HOSTILE) for group in data["groups"])
    (policy,) = [tag["content"] for _, tag in elements.tags if tag.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    named = re.findall(r"'sha256-(.*?)'", policy)
    assert named == [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in elements.scripts[2:]]
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy


def test_samples_of_the_same_reference_stand_together(write: Write, tmp_path: Path) -> None:
    rows = [(f"satz {i}", f"sentence {i}", f"sentence {i}") for i in range(8)]
    write(tmp_path / "a", predictions=rows, started="2026-02")
    write(tmp_path / "b", predictions=[(*row[:2], "nothing") for row in rows], started="2026-01")
    write(tmp_path / "c", predictions=rows, task="other", started="2025")
    grouped = samples(gather([tmp_path]))
    assert [sample.source for sample, _ in grouped] == ["satz 0", "satz 2", "satz 4", "satz 6"] * 2
    assert grouped[1][1] == [(0, "sentence 2"), (1, "nothing")]
    assert [number for number, _ in grouped[-1][1]] == [2]


def test_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    written = re.findall(
        r"`attnlab report (outputs [^`]+)`", (ROOT / "docs" / "how-to" / "compare.md").read_text(encoding="utf-8")
    )
    assert written and command.main(shlex.split(written[0])) == command.main([]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (2 * "report.html\n", "")
    page = Elements((tmp_path / "report.html").read_text(encoding="utf-8"))
    lines = [line for line in page.text.splitlines() if line.startswith("No runs")]
    assert lines == ["No runs in outputs: a run leaves its record.json in its directory, below outputs/."]
    assert "script" not in dict(page.tags)


def test_the_command_line_takes_the_words_in_their_order(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names with an equals sign are files here, not settings."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "lr=1" / "run")
    monkeypatch.setattr(sys, "argv", ["attnlab", "report", "lr=1", "-o", "page"])
    assert cli.command() == 0 and (tmp_path / "page").stat().st_size > 1_000_000
    monkeypatch.setattr(sys, "argv", ["attnlab", "report", "nowhere", "-o", "page"])
    assert cli.command() == 1
    assert capsys.readouterr().err.startswith("error: nowhere: no such file or folder")


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "attnlab.report.page.render", None)
    with pytest.raises(ConfigError, match=r"needs Bokeh and itables: pip install 'attnlab\[report\]'"):
        command.main([str(tmp_path)])
