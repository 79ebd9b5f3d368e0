"""Data of a user, by the commands of docs/how-to/data.md: training, scoring, the record and a prediction.

The folders are small parts of real corpora.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import run_command

pytestmark = pytest.mark.slow


def spoken(wave: Path) -> str:
    """The text of a recording of the yes/no corpus, whose name says it: 0_1_1.wav."""
    return " ".join("yes" if letter == "1" else "no" for letter in wave.stem.split("_"))


def recordings(corpora: Path, root: Path) -> tuple[list[str], str]:
    waves = sorted((corpora / "asr_yesno" / "waves_yesno").glob("*.wav"))
    for i, wave in enumerate(waves[:32]):
        folder = root / ("train", "train", "dev", "test")[i % 4]
        folder.mkdir(exist_ok=True)
        shutil.copy(wave, folder)
        (folder / f"{wave.stem}.txt").write_text(f"{spoken(wave)}\n")
    return ["experiment=own/speech"], str(waves[40])


def letters(corpora: Path, root: Path) -> tuple[list[str], str]:
    lines = (corpora / "lm_tinyshakespeare" / "input.txt").read_text().splitlines()[:2500]
    (root / "train.txt").write_text("\n".join(lines) + "\n")  # validation and test are held out
    return ["experiment=own/text", "attention=tpa"], "First Citizen: speak"


def pairs(corpora: Path, root: Path) -> tuple[list[str], str]:
    folder = corpora / "nmt_wmt_en_de_10k"
    sides = [(folder / f"{side}-train.txt").read_text().split("\n")[:200] for side in ("src", "tgt")]
    with (root / "data.jsonl").open("w") as file:
        for english, german in zip(*sides, strict=True):
            file.write(json.dumps({"en": english, "de": german}, ensure_ascii=False) + "\n")
    columns = ["task.data.reader.source=en", "task.data.reader.target=de"]
    drop = "task.data.drop_empty=true"  # the published pairs have one without a source
    return ["experiment=own/translation", *columns, drop], "The house is small."


def photos(corpora: Path, root: Path) -> tuple[list[str], str]:
    kinds = sorted(path for path in (corpora / "img_fruits360" / "train").iterdir() if path.is_dir())[:3]
    for kind in kinds:
        images = sorted(kind.glob("*.jpg"))
        for split, chosen in (("train", images[:14]), ("val", images[14:18])):
            (root / split / kind.name).mkdir(parents=True)
            for image in chosen:
                shutil.copy(image, root / split / kind.name)
    sizes = ["task.pretrain.epochs=2", "task.train.batch.images=20", "compress=irratt", "rank=32"]
    return ["task=imagenet", *sizes], str(min((corpora / "img_fruits360" / "val" / kinds[0].name).glob("*.jpg")))


@pytest.mark.parametrize("prepare", [recordings, letters, pairs, photos], ids=lambda prepare: prepare.__name__)
def test_own_data_end_to_end(
    prepare: Callable[[Path, Path], tuple[list[str], str]], corpora: Path, tmp_path: Path
) -> None:
    root, run = tmp_path / f"my_{prepare.__name__}", tmp_path / "run"
    root.mkdir()
    arguments, value = prepare(corpora, root)
    where = [f"data_root={root}", f"cache_dir={tmp_path / 'cache'}", f"hydra.run.dir={run}", "hardware=cpu"]
    trained = run_command(*arguments, "task.train.max_epochs=1", *where)
    assert trained.returncode == 0, trained.stderr
    record = json.loads((run / "record.json").read_text())
    assert record["status"] == "finished"
    assert record["corpus"].startswith(f"{root.name} at {root}")
    assert record["identity"]["corpus"] not in ("not run", "", None)
    assert "embedded sample" not in trained.stderr + trained.stdout
    assert f"{root.name} at" in trained.stdout, trained.stdout  # the table names it as well
    shutil.rmtree(root)  # the run alone is needed
    shutil.rmtree(tmp_path / "cache")
    used = run_command("mode=predict", f"checkpoint={run}", f"input={value}", "hardware=cpu")
    assert used.returncode == 0, used.stderr
    assert used.stdout.endswith("\n") and "error" not in used.stderr, (used.stdout, used.stderr)
    assert "<unk>" not in used.stdout
