"""The export of a converted model has the tokenizer, chat template and ends of the model that was converted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attnlab
from attnlab.config.check import check
from attnlab.data.samples import markov
from attnlab.data.text.tokenizer import Tokenizer as TextTokenizer
from attnlab.data.text.vocabulary import BytePairVocabulary, read_vocabulary
from attnlab.errors import DataError
from attnlab.modes import convert, export, generate
from attnlab.pretrained.huggingface import tokenizer_files
from attnlab.run.loading import load
from attnlab.run.record import new, write
from tests.pretrained.tokens import KINDS, TEXTS, pretrained
from tests.tasks.conftest import recorded

DATA = ["task.data.window=16", "task.data.eval_batch_size=64", "task.data.eval_windows=4", "task.sampling.tokens=8"]
SCORE = ["task.score.sliding_stride=8", "task.score.prompt_tokens=8", "task.score.continuations=2"]
CALIBRATION = ["convert.calibration.tokens=128", "convert.calibration.window=32"]
CHAT = [{"role": "user", "content": "Hello"}]
Convert = Callable[..., tuple[Path, Path]]


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Convert:
    monkeypatch.setattr(markov, "LINES", {"train": 60, "validation": 20, "test": 20})

    def make(
        kind: str,
        target: str = "mla",
        *words: str,
        pieces_alone: bool = False,
        generation: dict[str, Any] | None = None,
    ) -> tuple[Path, Path]:
        """The folder of the model, and the run; `generation`: more settings of its generation config."""
        folder, run = pretrained(tmp_path / "source", kind), tmp_path / "run"
        if generation is not None:
            file = folder / "generation_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | generation))
        if pieces_alone:
            sentence_pieces(folder)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ bos_token }}tool")
        settings = ["hardware=cpu", "task=wikitext2", *DATA, *SCORE, *CALIBRATION, f"cache_dir='{tmp_path}/cache'"]
        words = (
            f"model='{folder}'",
            "mode=convert",
            f"convert={target}",
            *(words or ("convert.keep=0.5", "convert.layers=same")),
        )
        cfg = check([*settings, *words], load).jobs[0]
        record = recorded(convert, (cfg, new(cfg, "test")), run)
        write(record | {"status": "finished"}, run)
        return folder, run

    return make


def sentence_pieces(folder: Path) -> None:
    """Replace the tokenizer of a folder by a SentencePiece model, as of Mistral 7B."""
    tokenizer = TextTokenizer.train(TEXTS * 20, 60, "bpe")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(tokenizer.model)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    settings = names | {"tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def exported(run: Path, format: str) -> Path:
    cfg = check(["mode=export", f"checkpoint='{run}'", "hardware=cpu", f"format={format}"], load).jobs[0]
    return Path(recorded(export, (cfg, new(cfg, "test")), None)["exported"])


def generated(run: Path) -> str:
    words = ["mode=generate", f"checkpoint='{run}'", "hardware=cpu", "task.sampling.temperature=0", "prompt=The"]
    cfg = check([*words, "task.sampling.tokens=24"], load).jobs[0]
    return str(recorded(generate, (cfg, new(cfg, "test")), None)["generation"]["text"])


def same_as_source(folder: Path, place: Path, files: dict[str, bytes], model: bool = True) -> None:
    from transformers import AutoTokenizer

    assert {name: (place / name).read_bytes() for name in files} == files
    if not model:
        return
    words, source = (AutoTokenizer.from_pretrained(path, trust_remote_code=False) for path in (place, folder))
    for text in ("Hello world", "", "The sün\n  is"):
        assert words(text).input_ids == source(text).input_ids
    assert words.apply_chat_template(CHAT, tokenize=False) == source.apply_chat_template(CHAT, tokenize=False)
    configs = [json.loads((path / "config.json").read_text()) for path in (place, folder)]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert configs[0].get(name) == configs[1].get(name)


def by_transformers(place: Path, prompt: str = "The") -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(
        place, trust_remote_code=(place / "modeling_attnlab.py").is_file()
    )
    words = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    ids = words(prompt, return_tensors="pt")
    row = model.eval().generate(**ids, do_sample=False, max_new_tokens=24)[0]
    whole, before = (words.decode(part, skip_special_tokens=True) for part in (row, ids.input_ids[0]))
    return str(whole[len(before) :])


@pytest.mark.parametrize(
    "kind", ["bos", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in ("bos", "gpt2"))]
)
def test_every_format_has_the_files_of_the_source(kind: str, converted: Convert, tmp_path: Path) -> None:
    """Also where run and source were moved."""
    source, run = converted(kind)
    files = tokenizer_files(str(source))
    assert {"tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"} <= files.keys()
    folder, run = source.rename(tmp_path / "elsewhere"), run.rename(tmp_path / "moved")
    text = generated(run)
    for format in ("hf", "deepseek", "safetensors"):
        place = exported(run, format)
        same_as_source(folder, place, files, format != "safetensors")
        if format != "safetensors":
            assert by_transformers(place) == text
            settings: Any = {"tokens": 24, "temperature": 0.0}
            assert attnlab.load(place).predict("The", **settings)["prediction"] == text


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gqa", "mtla", "tpa"])
def test_every_target_has_the_files_of_the_source(target: str, converted: Convert, tmp_path: Path) -> None:
    settings = {"gqa": ("convert.groups=1",), "mtla": ("convert.keep=0.5", "stride=2"), "tpa": ("convert.rank=2",)}
    source, run = converted("several-ends", target, *settings[target])
    folder, run = source.rename(tmp_path / "elsewhere"), run.rename(tmp_path / "moved")
    place = exported(run, "hf")
    same_as_source(folder, place, tokenizer_files(str(folder)))
    assert by_transformers(place) == generated(run)


def test_a_run_of_an_earlier_version_is_exported(
    converted: Convert, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its vocabulary has the ids alone; that the rest is missing is said."""
    _, run = converted("no-bos")
    file = run / "vocabulary.json"
    plain = json.loads(file.read_text())
    old = {key: plain[key] for key in ("tokenizer", "size", "ends", "end")} | {"kind": "byte pairs"}
    fingerprint = read_vocabulary(file).fingerprint
    file.write_text(json.dumps(old))
    vocabulary = read_vocabulary(file)
    assert type(vocabulary) is BytePairVocabulary and vocabulary.fingerprint == fingerprint
    place = exported(run, "hf")
    assert (place / "tokenizer.json").is_file() and not (place / "chat_template.jinja").exists()
    assert any("an earlier version left out the tokenizer's files" in message for message in caplog.messages)


def test_a_vocabulary_with_other_files_or_values_is_refused(converted: Convert) -> None:
    """An export writes the files by name."""
    _, run = converted("no-bos")
    file = run / "vocabulary.json"
    plain = json.loads(file.read_text())
    names = [
        "../../outside.json",
        "/tmp/outside.json",
        "config.json",
        "a.py",
        "x/y.json",
        "..json",
        "model.safetensors",
        "",
    ]
    files = [{name: "text"} for name in names] + [{"a.json": value} for value in (3, {"base64": "%"}, {}, None)]
    others: dict[str, tuple[Any, ...]] = {
        "files": (*files, [], "x", None, 3),
        "stops": (["a"], [[1]], [-1], [1.0], [True], [None], "x", {}, 3, None, [1 << 40]),
        "bos": ("x", -1, 1.5, [], {}, True, 1 << 40),
        "ends": ("x", None, [], 3),
        "split_special": ("x", 1, None),
        **dict.fromkeys(("left_out", "config"), ([], "x", None, 3)),
        **dict.fromkeys(("size", "end", "tokenizer"), ("no token", None, [], {}, -1, 2.5)),
    }
    for key, value in [(key, value) for key, values in others.items() for value in values]:
        file.write_text(json.dumps(plain | {key: value}))
        with pytest.raises(DataError, match=r"vocabulary\.json") as error:
            exported(run, "hf")
        assert "\n" not in str(error.value)


def test_a_class_that_follows_from_the_type_of_the_model_is_named(
    converted: Convert, caplog: pytest.LogCaptureFixture
) -> None:
    """Mistral's sentence pieces in a folder without tokenizer.json: their class depends on the type of the model."""
    source, run = converted("pieces", pieces_alone=True)
    place = exported(run, "deepseek")
    files = tokenizer_files(str(source))
    assert "tokenizer.json" not in files and files.pop("tokenizer_config.json")
    same_as_source(source, place, files)
    assert by_transformers(place) == generated(run)
    assert any("names PreTrainedTokenizerFast, and tokenizer.json" in message for message in caplog.messages)


def test_settings_of_the_generation_config_are_not_applied(
    converted: Convert, caplog: pytest.LogCaptureFixture
) -> None:
    """`predict` of an export gives the text of its run, and a damaged generation config is refused."""
    other = {"repetition_penalty": 3.0, "do_sample": True, "no_repeat_ngram_size": 1, "top_k": 3, "min_length": 90}
    _, run = converted("bos", generation=other | {"temperature": 2.5, "bad_words_ids": [[5], [9]]})
    text, place = generated(run), exported(run, "deepseek")
    caplog.clear()
    model = attnlab.load(place)
    assert model.predict("The", tokens=24, temperature=0.0)["prediction"] == text
    named = [message for message in caplog.messages if "not applied" in message]
    assert len(named) == 1 and all(name in named[0] for name in other)
    for content in ("[", "null", '{"eos_token_id": "two"}'):
        (place / "generation_config.json").write_text(content)
        with pytest.raises(DataError, match=r"generation_config\.json: ") as error:
            attnlab.load(place)
        assert "\n" not in str(error.value)
