"""The export of a converted model has the tokenizer, chat template and ends of the model that was converted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlab
from attnlab.config.check import check
from attnlab.data.text.vocabulary import BytePairVocabulary, read_vocabulary
from attnlab.errors import DataError
from attnlab.modes import export, generate
from attnlab.pretrained.huggingface import tokenizer_files
from attnlab.run.loading import load
from attnlab.run.record import new
from tests.export.conftest import Convert
from tests.pretrained.tokens import KINDS
from tests.tasks.conftest import recorded

CHAT = [{"role": "user", "content": "Hello"}]


def exported(run: Path, format: str, *words: str) -> Path:
    cfg = check(["mode=export", f"checkpoint='{run}'", "hardware=cpu", f"format={format}", *words], load).jobs[0]
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


def by_transformers(place: Path, prompt: str = "The", new: int = 24) -> str:
    return continued_by_transformers(place, prompt, new)[0]


def continued_by_transformers(place: Path, prompt: str, new: int) -> tuple[str, list[int]]:
    """The greedy continuation, as text and as ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(
        place, trust_remote_code=(place / "modeling_attnlab.py").is_file()
    )
    words = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    ids = words(prompt, return_tensors="pt")
    row = model.eval().generate(**ids, do_sample=False, max_new_tokens=new)[0]
    whole, before = (words.decode(part, skip_special_tokens=True) for part in (row, ids.input_ids[0]))
    return str(whole[len(before) :]), row[ids.input_ids.shape[1] :].tolist()


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


@pytest.mark.parametrize("layers", ["budget", pytest.param("same", marks=pytest.mark.slow)])
def test_weights_are_rounded_and_rotary_frequencies_are_not(layers: str, converted: Convert, tmp_path: Path) -> None:
    """Positions times rounded frequencies would be wrong by whole turns."""
    from transformers import AutoModelForCausalLM

    _, run = converted("bos", "mla", "convert.keep=0.5", f"convert.layers={layers}")
    whole = exported(run, "hf").rename(tmp_path / "whole")
    for format in ("hf", *["deepseek"] * (layers == "same")):
        place = exported(run, format, "dtype=bfloat16")
        assert json.loads((place / "config.json").read_text())["dtype"] == "bfloat16"
        code = (place / "modeling_attnlab.py").is_file()
        models: list[Any] = [
            AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype="auto").eval()
            for path in (place, whole)
        ]
        rounded, exact = models
        assert {parameter.dtype for parameter in rounded.parameters()} == {torch.bfloat16}
        if code:
            for one, other in zip(rounded.model.attentions, exact.model.attentions, strict=True):
                assert torch.equal(one.frequencies, other.frequencies)
        ids = torch.randint(3, 60, (2, 90), generator=torch.Generator().manual_seed(1))
        expected = exact(ids).logits
        assert (rounded(ids).logits.float() - expected).abs().mean() < 0.05 * expected.abs().mean()
