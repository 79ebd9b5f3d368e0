"""Every table and figure under experiments/ is what the committed records give, byte for byte."""

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from attnlab.config.build import CONF
from attnlab.errors import ConfigError
from attnlab.report import bench, claims, command, figure
from attnlab.report.command import main
from attnlab.report.render import write_table
from attnlab.report.spec import read_spec
from attnlab.run.identity import recipe, run
from attnlab.run.record import RECORD, problems
from attnlab.run.store import SavedRecord, collect

ROOT = CONF.parent
EXPERIMENTS = ROOT / "experiments"
SPECS = command.specifications(EXPERIMENTS)
LONG = {"recall/shifted.yaml", "recall/table.yaml", "irratt/dinov2.yaml"}  # compose many rows
LONG |= {"t6/table7.yaml", "t6/variants.yaml", "comparison/digits_rates.yaml", "comparison/an4_rates.yaml"}
LONG |= {"comparison/wikitext2.yaml", "comparison/wikitext2_rates.yaml"}
LONG |= {f"comparison/compression_{name}.yaml" for name in ("photos", "gpt2", "llama")}
EACH_SPEC = [pytest.param(path, marks=pytest.mark.slow) if str(path).endswith(tuple(LONG)) else path for path in SPECS]
FOLDERS = command.folders(EXPERIMENTS)
PICTURES = sorted(EXPERIMENTS.rglob("*.png"))
WITHOUT_CURVES = {  # folders whose runs were packed before curves were part of a line
    "comparison/digits", "comparison/digits_rates", "comparison/wikitext2", "comparison/wikitext2_rates",
    "convert/needle", "demo", "irratt/fruits360", "irratt/low_ranks", "irratt/sample", "mtla/real", "mtla/st_digits",
    "recall/needle", "recall/selective_copying", "t6/variants",
}  # fmt: skip
SPREAD = r"[\d.]+ \([\d.]+ to [\d.]+\)"


def name(path: Path) -> str:
    return path.relative_to(EXPERIMENTS).as_posix()


@pytest.fixture(scope="module")
def records() -> list[SavedRecord]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # records are named from here
        return collect([Path("experiments")])


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture is drawn: tests of each report draw theirs."""
    monkeypatch.setattr(figure, "drawn_from", lambda path: digest(path.with_suffix(".csv")))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def same(rendered: list[Path], folder: Path) -> None:
    """Texts and tables to the byte; a picture by the table that it was drawn from."""
    for path in rendered:
        committed = folder / path.name
        assert committed.is_file(), f"{name(committed)} is missing: render it again"
        if path.suffix != ".png":
            assert committed.read_bytes() == path.read_bytes(), f"{name(committed)}: render it again"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("path", EACH_SPEC, ids=name)
def test_a_table(path: Path, records: list[SavedRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    below = command.below(path.parent.relative_to(ROOT), records)
    same(write_table(read_spec(path), below, tmp_path / path.stem), path.parent)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("folder", "report"), FOLDERS, ids=lambda part: name(part) if isinstance(part, Path) else "")
def test_a_report(folder: Path, report: command.Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    same(report(collect([folder.relative_to(ROOT)]), tmp_path), folder)


def test_the_page_of_speeds(records: list[SavedRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = EXPERIMENTS / "SPEED.md"
    committed = page.read_bytes()
    written: list[str] = []
    monkeypatch.setattr(bench, "write_text", lambda path, text: written.append(text))
    assert bench.render_speeds(records, page.parent) == [page]
    assert written[0].encode() == committed, "render it again: report speed experiments --out experiments"


def test_the_page_of_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(claims, "write_text", lambda path, text: written.append(text))
        assert claims.render(EXPERIMENTS / claims.FILE) == [EXPERIMENTS / "claims.md"]
    assert written == [(EXPERIMENTS / "claims.md").read_text()], "render it again: report table experiments/claims.yaml"
    place = tmp_path / claims.FILE
    claim: dict[str, Any] = {"claim": "C", "where": "W", "why": "Y"}
    page = {"title": "T", "papers": {"P": {"claims": [claim]}}}
    place.write_text(yaml.safe_dump(page))
    assert main(["table", str(place)]) == 0 and "| C | – | not run |" in (tmp_path / "claims.md").read_text()
    for wrong, message in (
        ({"test": "agree"}, "agree.* none of agrees"),
        ({"reads": "counts"}, "counts.* none of count"),
        ({"verdict": "refuted"}, "verdict"),
        ({"number": "3<!-- = none.csv : A -->"}, "mark 'none.csv : A'"),
        ({"reads": "difference", "number": "3"}, "too few numbers"),
        ({"reads": "count", "asks": [1]}, r"asks \[1\]"),
        ({"reads": "count", "asks": 5}, "int"),
        ({"number": 5}, "expected string"),
        ({"why": None}, "NoneType"),
        ({"commands": 5}, "int"),
    ):
        claim.clear()
        claim.update({"claim": "C", "where": "W", "why": "Y"} | wrong)
        place.write_text(yaml.safe_dump(page))
        with pytest.raises(ConfigError, match=rf"claims\.yaml.*{message}"):
            main(["table", str(place)])


@pytest.mark.parametrize(
    "path", [ROOT / "docs" / "how-to" / "speed.md", *sorted(EXPERIMENTS.glob("*/README.md"))], ids=str
)
def test_the_ratios_of_speed_in_a_readme_are_those_of_the_page(path: Path) -> None:
    """Each row's, next to each other as in a row of SPEED.md, with the factor of memory that follows there."""
    rows = [re.sub(r" *\| *", "|", line) for line in (EXPERIMENTS / "SPEED.md").read_text().splitlines()]
    for line in path.read_text().splitlines():
        if line.startswith("|") and (match := re.search(rf"{SPREAD}( \| {SPREAD})*( \| [\d.]+)?", line)):
            ratios = re.sub(r" *\| *", "|", match[0])
            assert any(f"|{ratios}|" in row for row in rows), line


@pytest.mark.slow
def test_the_command_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make tables figures` on a clean clone: no file differs from the committed one, none is new."""
    shutil.copytree(EXPERIMENTS, tmp_path / "experiments")
    monkeypatch.chdir(tmp_path)
    assert main(["table", "experiments"]) == main(["figure", "experiments"]) == 0
    folders = EXPERIMENTS, tmp_path / "experiments"
    before, after = ({p.relative_to(d): p.read_bytes() for p in d.rglob("*") if p.is_file()} for d in folders)
    assert [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)] == []


def test_there_is_something_to_compare() -> None:
    assert len(SPECS) >= 32 and len(FOLDERS) >= 5 and len(PICTURES) >= 5
    texts = [path.read_text() for path in (ROOT / "docs" / "how-to" / "speed.md", *EXPERIMENTS.glob("*/README.md"))]
    assert sum(len(re.findall(SPREAD, text)) for text in texts) > 60


@pytest.mark.parametrize("path", PICTURES, ids=name)
def test_a_picture_was_drawn_from_the_numbers_beside_it(path: Path) -> None:
    assert figure.drawn_from(path) == digest(path.with_suffix(".csv"))


def test_every_record_is_whole_and_has_its_identity(records: list[SavedRecord]) -> None:
    """What a record stores is what its configuration gives today: a renamed key needs its line in the table."""
    assert len(records) >= 70
    for saved in records:
        about, environment = saved.record["identity"], saved.record["environment"]
        assert problems(saved.record) == [] and saved.record["status"] == "finished", saved.name
        assert recipe(saved.record["config"], about["weights"]) == about["recipe"], saved.name
        place = environment["device"], environment["threads"]
        assert run(saved.record["config"], about["corpus"], about["weights"], *place) == about["run"], saved.name
        assert saved.record["task"] == saved.record["config"]["task"]["name"], saved.name
    runs = [saved.record["identity"]["run"] for saved in records]
    assert len(set(runs)) == len(runs)


def test_a_committed_training_has_its_curves_except_in_the_folders_that_the_readme_names(
    records: list[SavedRecord],
) -> None:
    without = [s for s in records if s.record["mode"] == "train" and not s.record.get("curves")]
    places = [(saved.path.parent.parent if saved.path.name == RECORD else saved.path.parent) for saved in without]
    assert {place.relative_to("experiments").as_posix() for place in places} == WITHOUT_CURVES
    readme = " ".join((EXPERIMENTS / "README.md").read_text().split())
    named = re.search(r"Runs without curves, packed before these were part of a line: ([^.]*)\.", readme)
    assert named and set(re.findall(r"`([^`]+)`", named[1])) == WITHOUT_CURVES


def test_sample_images_and_photos_are_runs_of_the_same_recipes(records: list[SavedRecord]) -> None:
    images = [saved.record for saved in records if saved.path.parent.name in ("sample", "fruits360")]
    images = [record for record in images if record["task"] == "imagenet" and "compression" in record]
    trained = [record for record in images if record["mode"] == "train"]
    assert len(trained) == 40 and len({record["identity"]["recipe"] for record in trained}) == 20
