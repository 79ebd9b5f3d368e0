"""The four published layouts, from the sample world and from the real files, and one line for each broken input."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from attnlab.data.questions import Question, Questions, question_set
from attnlab.data.report import Report
from attnlab.data.samples.world import write_world
from attnlab.errors import DataError
from tests.data.layouts import write


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("cache"), 1)


@pytest.mark.slow
def test_real_hotpotqa_and_fever(corpora: Path) -> None:
    root = corpora / "qa_hotpot_fever"
    hotpot, fever = question_set("hotpotqa").read(root), question_set("fever").read(root)
    assert len(hotpot) == 7405
    assert hotpot[0].prompt == "Were Scott Derrickson and Ed Wood of the same nationality? The answer is"
    assert hotpot[0].answers == ("yes",)
    assert 6000 < len(fever) <= 6666  # 3333 claims of each label, duplicates merged
    assert {answer for question in fever for answer in question.answers} == {"true", "false"}
    assert fever[0].prompt == (
        "Consider the following claim: Fox 2000 Pictures released the film Soul Food. Is this claim true or false. "
        "The claim is"
    )


def test_as_many_training_rows_as_validation_rows_come_first(tmp_path: Path) -> None:
    for name, count in (("train-00000-of-00001", 5), ("validation-00000-of-00001", 2)):
        table = {"question": [f"{name} {i}" for i in range(count)], "answer": ["a"] * count, "context": [1] * count}
        (tmp_path / "fullwiki").mkdir(exist_ok=True)
        parquet.write_table(pyarrow.table(table), tmp_path / "fullwiki" / f"{name}.parquet")
    texts = [question.text for question in question_set("hotpotqa").read(tmp_path)]
    train, validation = "train-00000-of-00001", "validation-00000-of-00001"
    assert texts == [f"{train} 0", f"{train} 1", f"{validation} 0", f"{validation} 1"]


def test_claims_with_both_labels_are_left_out_and_repeated_ones_count_once(tmp_path: Path) -> None:
    claims = [
        ("A.", 1), ("A.", "SUPPORTS"), ("B.", "SUPPORTS"), ("B.", "REFUTES"), ("C", 0), ("D.", "NOT ENOUGH INFO"),
    ]  # fmt: skip
    write(tmp_path / "paper_dev.jsonl", *(json.dumps({"claim": text, "label": label}) for text, label in claims))
    with Report().of("questions") as report:
        questions = question_set("fever").read(tmp_path)
    assert {reason: note.count for reason, note in report.left_out.items()} == {
        "claim that occurs again": 2,
        "claim without enough information": 1,
        "claim with both labels": 1,
    }
    assert [(question.text, question.answers) for question in questions] == [("A.", ("true",)), ("C", ("false",))]
    assert "claim: C. Is this" in questions[1].prompt
    write(tmp_path / "paper_dev.json", '{"claim": "A.", "label": 1}')
    with pytest.raises(DataError, match="files of the same split; keep one"):
        question_set("fever").read(tmp_path)


def test_biographies_of_eight_professions_by_number_or_name(tmp_path: Path) -> None:
    rows = [("One", 20), ("Two.", "poet"), ("Three.", 0), ("Four.", "software_engineer")]
    write(tmp_path / "dev.jsonl", *(json.dumps({"hard_text": text, "profession": number}) for text, number in rows))
    with Report().of("questions") as report:
        questions = question_set("bios").read(tmp_path)
    assert [question.answers[0] for question in questions] == ["poet", "poet"]
    assert report.left_out["another profession"].count == 2
    assert questions[0].prompt.startswith("Consider the following text: One. What is the profession")
    masked = question_set("bios").masked_prompt("a b c", "<mask>", lambda text, count: text[-count:])
    assert masked == "Consider the following text: a b c. The profession of the person in the text is called <mask>."


def test_bigbench_rows_with_one_target(tmp_path: Path) -> None:
    examples = [{"input": "A lies in ", "target": "B"}, {"input": "C", "target": ["D", "E"]}]
    write(tmp_path / "qa_wikidata" / "task.json", json.dumps({"examples": examples}))
    with Report().of("questions") as report:
        questions = question_set("wikidata").read(tmp_path)
    assert report.left_out["not one target"].count == 1
    assert [(question.prompt, question.answers) for question in questions] == [("A lies in", ("B",))]


@pytest.mark.parametrize(
    ("name", "file", "text", "expected"),
    [
        ("fever", "paper_dev.jsonl", '{"claim": "A.", "label": 1}\n{"claim": "B"\n', "jsonl line 2: malformed"),
        ("fever", "paper_dev.jsonl", '{"claim": "A.", "label": 7}\n', "line 1: 'label' is 7; expected one of SUPPORTS"),
        ("hotpotqa", "validation.json", '[{"question": "q?"}]', "item 1: 'answer' is missing"),
        ("hotpotqa", "validation.json", '[{"question": "q?", "answer": " "}]', "item 1: an empty question, or"),
        ("bios", "dev.jsonl", '{"hard_text": "x", "profession": 99}', "'profession' is 99; expected 0 to 27"),
        ("bios", "other.txt", "", "no files of Bios Profession; expected dev-"),
    ],
)  # fmt: skip
def test_broken_input_is_one_line_with_its_place(
    name: str, file: str, text: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(DataError) as caught:
        question_set(name).read(tmp_path)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_first_fifth_is_validation_and_long_answers_are_left_out(place: Path, tmp_path: Path) -> None:
    assert all(len(question_set(name).read(place)) >= 64 for name in ("hotpotqa", "fever", "bios", "wikidata"))
    data = Questions(str(place), str(tmp_path), "wikidata", limit=33, longest_answer=5)
    everything = question_set("wikidata").read(place)
    data.read()
    data.setup(len)
    short = [question for question in everything if len(question.answers[0]) <= 5]
    assert 33 <= len(short) < len(everything)
    notes = data.report.splits["questions"].left_out
    assert notes["answer of too many tokens"].count == len(everything) - len(short)
    assert notes["beyond task.data.limit"].count == len(short) - 33
    assert data.validation + data.test == short[:33] and len(data.validation) == 6


def test_a_seed_and_a_share_make_two_random_parts_without_a_common_question(place: Path, tmp_path: Path) -> None:
    def split(**options: Any) -> tuple[list[Question], list[Question]]:
        data = Questions(str(place), str(tmp_path), "fever", limit=30, **options)
        data.read()
        data.setup(len)
        return data.validation, data.test

    everything = question_set("fever").read(place)
    first, others = split(shuffle=1, share=0.5)
    assert len(first) == len(others) == 15 and {q.text for q in first}.isdisjoint(q.text for q in others)
    assert first + others != everything[:30] and all(question in everything for question in first + others)
    assert split(shuffle=1, share=0.3)[0] == first[:9] and split(shuffle=2, share=0.5)[0] != first
    with pytest.raises(DataError, match="a share of 0.01 validates; expected at least 100"):
        split(share=0.01)
