"""`attnlab runs`, and the run that an evaluation names."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnlab.errors import ConfigError, DataError
from attnlab.modes import evaluate
from attnlab.report.runs import main
from attnlab.run.record import SECTIONS
from tests.report.conftest import Run
from tests.run.test_ledger import write

TRAINED = "FineWeb-Edu at /some/where: train 99000000000, validation 99999744, test 99999744 tokens; vocabulary 50257"
Printed = Callable[..., tuple[list[str], str]]


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """What a command prints to stdout, as lines, and to stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[list[str], str]:
        assert main(arguments) == 0
        printed = capsys.readouterr()
        return printed.out.splitlines(), printed.err

    return run


def names(lines: list[str]) -> list[str]:
    return [match[0] for line in lines[1:] if (match := re.search(r"outputs/\S+", line))]


def test_a_list_and_its_filters(printed: Printed, tmp_path: Path) -> None:
    write(tmp_path / "outputs" / "a")
    write(tmp_path / "outputs" / "b", attention="tpa", stride=None, tags=[], started="2026-02", seed=12)
    write(tmp_path / "outputs" / "c", status="failed", error="disk\nfull", started="2026-03", quality={})
    lines, errors = printed()
    headings = "started (UTC) status mode task corpus mechanism scale seed updates quality cache directory parent"
    assert " ".join(lines[0].split()) == headings
    cells = "finished train mustc sample mtla s=2 sample 1 BLEU 20.5 144 outputs/a"
    assert " ".join(lines[1].split()[2:]) == cells
    assert re.search(r"not run +144  outputs/c +\(disk full\)$", lines[3])
    assert errors == "3 runs\n"
    assert names(printed("attention=tpa*")[0]) == ["outputs/b"]
    assert names(printed("status=finished,failed", "tags=b")[0]) == ["outputs/a", "outputs/c"]
    assert names(printed("stride=null", "seed=12", "outputs")[0]) == ["outputs/b"]
    assert printed("seed=12")[1] == "1 run\n"
    trained = dict.fromkeys(SECTIONS["training"].split(), 1200000)
    parent = {"path": str(tmp_path / "outputs" / "a"), "run": "1234"}
    write(tmp_path / "outputs" / "d", quality={"bleu": 30.0}, parent=parent, training=trained)
    (line,) = [line for line in printed()[0] if "outputs/d" in line]
    assert line.split()[-6:] == ["1200000", "BLEU", "30", "144", "outputs/d", "outputs/a"]
    assert names(printed("sort=quality")[0]) == [f"outputs/{name}" for name in "dabc"]
    for name, value in (("e", 9.0), ("f", 8.0)):
        write(tmp_path / "outputs" / name, task="wikitext2", quality={"perplexity": value})
    assert names(printed("sort=quality", "task=wikitext2")[0]) == ["outputs/f", "outputs/e"]
    lines, errors = printed("task=ptb")
    assert len(lines) == 1 and errors == "0 runs\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["atention=mha"], "runs atention=mha: runs are not filtered by atention; nearest: attention"),
        (["compar", "a"], "runs compar: neither a folder nor one of compare, missing, prune; nearest: compare"),
        (["sort=qualty"], "runs sort=qualty: expected one of started, quality; nearest: quality"),
        (["prune", "failed", "sort=quality"], "runs prune: sort= belongs to the list of runs"),
        (["--yess"], "runs --yess: no such option; nearest: --yes"),
        (["--yes"], "--yes belongs to attnlab runs prune"),
        (["compare", "a"], "runs compare takes two or more"),
        (["prune"], "runs prune: say what to remove: failed, interrupted, broken"),
        (["prune", "fialed"], "nearest: failed"),
        (["missing"], "runs missing takes specifications of tables"),
        (["missing", "nothing.yaml"], "nothing.yaml: cannot be read"),
    ],
)
def test_wrong_words(arguments: list[str], message: str, printed: Printed) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        printed(*arguments)


def test_missing_places(printed: Printed) -> None:
    with pytest.raises(DataError, match="outputs: no such folder"):
        printed()
    with pytest.raises(DataError, match="a/record.json: no such file|a: no such file"):
        printed("compare", "a", "b")


def test_a_comparison(printed: Printed, run: Run) -> None:
    run("one", "task=mustc attention=mtla", parameters__total=1000)
    run("two", "task=mustc attention=mha", "seed=3", quality={"bleu": 25.0})
    lines, _ = printed("compare", "runs/one", "runs/two/record.json")
    values = {line.split()[0]: line.split()[1:] for line in lines}
    assert values["seed"] == ["1", "3"]
    assert values["attention._target_"] == ["MTLA", "MHA"]
    assert values["quality.bleu"] == ["20", "25", "(1.25x)"]
    assert values["parameters.total"] == ["1000", "not", "run"]
    assert "task.train.clip" not in values  # the same in both
    lines, _ = printed("compare", "runs/one", "runs/one")
    assert "RECIPE (the same)" in [line.strip() for line in lines]


def test_a_damaged_record_is_named_by_the_comparison(printed: Printed, run: Run) -> None:
    good = run("one", "task=mustc attention=mtla", corpus="x\udcff")
    record = json.loads(good.read_text())
    for i, change in enumerate(({"config": record["config"] | {"task": "x"}}, {"bench": None})):
        path = Path(f"runs/bad{i}/record.json")
        path.parent.mkdir()
        path.write_text(json.dumps(record | change))
        with pytest.raises(DataError, match=f"runs/bad{i}/record.json: not a record "):
            main(["compare", "runs/one", f"runs/bad{i}"])
    lines, _ = printed("compare", "runs/one", "runs/one")
    assert r"x\udcff" in "".join(lines)


def test_what_a_table_lacks(printed: Printed, run: Run, tmp_path: Path) -> None:
    columns = "[{key: bleu, label: BLEU, value: quality.bleu}]"
    rows = [
        "{label: MHA, command: attention=mha, published: {}}",
        "{label: MLA, command: attention=mla, published: {}}",
    ]
    (tmp_path / "table.yaml").write_text(
        "title: t\nsource: s\nbaseline: MHA\ncorpus: {name: MuST-C, train: [1, 300000]}\n"
        "before: first this\ncommand: python -m attnlab task=mustc {row} task.encoder_checkpoint=ASR\n"
        f"columns: {columns}\nrows: [{', '.join(rows)}, {{label: quoted, published: {{}}}}]\n"
    )
    lines, errors = printed("missing", "table.yaml", str(tmp_path))
    commands = [f"python -m attnlab task=mustc attention={name} task.encoder_checkpoint=ASR" for name in ("mha", "mla")]
    assert lines == ["first this", *commands]
    run("mha", "task=mustc attention=mha")
    run("failed", "task=mustc attention=mla", status="failed", error="no luck")
    lines, errors = printed("missing", "table.yaml", "runs")
    assert lines == ["first this", commands[1]]
    assert errors == "table.yaml: 1 of 2 rows are still to be run\n"
    run("mla", "task=mustc attention=mla")
    assert printed("missing", "table.yaml", "runs") == ([], "table.yaml: 0 of 2 rows are still to be run\n")


def test_a_broken_record_is_named(printed: Printed, tmp_path: Path) -> None:
    write(tmp_path / "outputs" / "a")
    (tmp_path / "outputs" / "b").mkdir()
    (tmp_path / "outputs" / "b" / "record.json").write_text("{")
    lines, errors = printed()
    assert names(lines) == ["outputs/a"]
    assert errors.startswith("warning: outputs/b/record.json: skipped: ")
    assert names(printed("status=broken")[0]) == ["outputs/b"]


def test_no_torch_is_imported(tmp_path: Path) -> None:
    write(tmp_path / "outputs" / "a")
    code = (
        "import sys, json; sys.argv[1:] = ['runs']; from attnlab.cli import command; code = command();"
        "print(json.dumps([code, 'torch' in sys.modules, 'matplotlib' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, False, False], done.stderr


def test_an_evaluation_names_what_its_model_was_trained_on(run: Run) -> None:
    path = run("trained", "task=fineweb_edu attention=tpa", corpus=TRAINED)
    assert evaluate.trained_on(str(path.parent)) == TRAINED
    path.unlink()
    assert evaluate.trained_on(str(path.parent)) == evaluate.trained_on(None) == ""
