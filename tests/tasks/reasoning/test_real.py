"""HotpotQA's and FEVER's own files from the reader to the record, with a tiny random model of every family."""

import json
import re
from pathlib import Path

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import pytest

from attnlab.modes import compress
from tests.tasks.conftest import recorded, starter
from tests.tasks.reasoning.conftest import Folder

COUNT, VALIDATION = 10, 2


def published(name: str, root: Path) -> list[tuple[str, str]]:
    """The first prompts and answers of the files, read here without the project's readers."""
    if name == "hotpotqa":
        rows = json.loads((root / "hotpot_dev_v1_simplified.json").read_text())[:COUNT]
        assert all(row["question"].endswith("?") for row in rows)
        return [(f"{row['question']} The answer is", row["answer"]) for row in rows]
    rows = [json.loads(line) for line in (root / "paper_dev.jsonl").read_text().splitlines()[:50]]
    labels = {"SUPPORTS": "true", "REFUTES": "false"}
    rows = [row for row in rows if row["label"] in labels][:COUNT]
    prompt = "Consider the following claim: {} Is this claim true or false. The claim is"
    assert all(row["claim"].endswith(".") for row in rows)
    return [(prompt.format(row["claim"]), labels[row["label"]]) for row in rows]


@pytest.mark.parametrize(("kind", "questions"), [("gpt_neox", "fever"), ("bert", "hotpotqa")])
def test_real_files_from_end_to_end(
    kind: str, questions: str, folder: Folder, tiny_cache: Path, corpora: Path, tmp_path: Path
) -> None:
    root = corpora / "qa_hotpot_fever"
    settings = ["task=reasoning", "hardware=cpu", f"cache_dir='{tiny_cache}'", f"data_root='{root}'"]
    settings += [f"task.questions={questions}", f"task.data.limit={COUNT}", "task.data.longest_answer=60"]
    cfg, record = starter(*settings)(f"model={folder(kind)}", "compress=tensorllm", "compress.ranks=[12,4]")
    record["environment"] = {"device": "cpu", "threads": 1}
    recorded(compress, (cfg, record), tmp_path)
    assert record["corpus"].endswith("2 validation and 8 test questions")
    lines = (tmp_path / "predictions.tsv").read_text().splitlines()[1:]
    cells = [line.split("\t") for line in lines]
    assert [(cell[0], cell[1]) for cell in cells] == published(questions, root)[VALIDATION:]
    about = record["compression"]
    dense, compressed = about["quality"]["dense"], about["quality"]["compressed"]
    assert dense["questions"] == compressed["questions"] == len(cells) == 8
    assert dense["loss"] != compressed["loss"] and 1 < dense["loss"] < 20 and 1 < compressed["loss"] < 20
    contained = [re.search(rf"\b{re.escape(cell[1])}\b", cell[2], re.IGNORECASE) is not None for cell in cells]
    right = [cell[2] == cell[1] for cell in cells] if questions == "fever" else contained
    assert [cell[3] for cell in cells] == [str(int(value)) for value in right]
    assert compressed["accuracy"] == 100 * sum(right) / 8
    assert len(about["layers"]) == 2 and about["rate"]["rate"] > 1
