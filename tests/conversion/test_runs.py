"""A pretrained decoder in a run: read, converted, healed, used, exported; at a tiny size, from a local folder."""

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from torch import nn

import attnlab
from attnlab.attention import MLA
from attnlab.config.check import check
from attnlab.conversion import Calibration, Healing, ToGQA
from attnlab.conversion.healing import Teacher
from attnlab.conversion.layer_file import CONVERSION, read_about, read_layers
from attnlab.conversion.layers import STORED, converted_copy
from attnlab.conversion.texts import calibration_tokens
from attnlab.data.samples import markov
from attnlab.data.samples.world import NAMES
from attnlab.data.text.vocabulary import BytePairVocabulary, byte_tokenizer
from attnlab.decoding import Sampling
from attnlab.errors import ConfigError, DataError
from attnlab.models import Decoder
from attnlab.modes import convert, describe, export, generate, test, train
from attnlab.pretrained import huggingface
from attnlab.run.directory import foreign
from attnlab.run.loading import load
from attnlab.run.record import new, write
from attnlab.tasks.language_modelling import task
from attnlab.tasks.language_modelling.module import Healed
from attnlab.tasks.language_modelling.task import LanguageModellingTask
from tests.conversion.models import FAMILIES, decoder_of, exact, reference, tokens
from tests.tasks.conftest import Start, recorded

SIZES = FAMILIES["llama"] | {"vocab_size": 257, "max_position_embeddings": 96, "bos_token_id": 256, "eos_token_id": 256}
DATA = ["task.data.window=16", "task.data.eval_batch_size=64", "task.data.eval_windows=8"]
SCORE = ["task.score.sliding_stride=8", "task.score.prompt_tokens=8", "task.score.continuations=2"]
TINY = ["hardware=cpu", "task=wikitext2", *DATA, *SCORE, "task.sampling.tokens=8"]
CALIBRATION = ["convert.calibration.tokens=256", "convert.calibration.window=32"]
QUICK = [*CALIBRATION, "convert.healing.steps=4", "convert.healing.tokens=64"]


@pytest.fixture(scope="module", autouse=True)
def _short_texts() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(markov, "LINES", {"train": 200, "validation": 20, "test": 20})
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("llama"), SIZES)


def written(folder: Path, sizes: dict[str, Any]) -> Path:
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    tiny: Any = huggingface.create("tiny", sizes)
    for parameter in tiny.parameters():
        nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else nn.init.ones_(parameter)
    tiny.save_pretrained(folder)
    mark = "<|endoftext|>"
    words = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=mark, bos_token=mark, pad_token=mark)
    words.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    cache = tmp_path_factory.mktemp("cache")

    def make(*words: str) -> tuple[DictConfig, dict[str, Any]]:
        quick = QUICK if any(word.startswith("convert=") for word in words) else []
        named = [] if any(word.startswith("model=") for word in words) else [f"model='{model}'"]
        arguments = [*TINY, *named, f"cache_dir='{cache}'", *quick, *words]
        cfg = check(arguments, load).jobs[0]
        return cfg, new(cfg, "test")

    return make


def used(run: Path, mode: str, *words: str) -> tuple[DictConfig, dict[str, Any]]:
    cfg = check([f"mode={mode}", f"checkpoint='{run}'", "hardware=cpu", *words], load).jobs[0]
    return cfg, new(cfg, "test")


def exported(run: Path, *words: str, **options: Any) -> Any:
    """A run as transformers loads it after mode=export."""
    from transformers import AutoModelForCausalLM

    record = recorded(export, used(run, "export", *words), None)
    return AutoModelForCausalLM.from_pretrained(record["exported"], **options)


@pytest.fixture(scope="module")
def healed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("healed")
    needle = ("task.score.needle.lengths=[72,96]", "task.score.needle.trials=2", "task.score.needle.depths=[0.5]")
    record = recorded(train, start("convert=mla", "convert.keep=0.5", *needle), directory)
    record["status"] = "finished"
    write(record, directory)
    return directory, record


def test_both_models_are_scored_on_the_same_windows(healed: tuple[Path, dict[str, Any]]) -> None:
    """The record has the ratio of their perplexities; the files of the original stay."""
    directory, record = healed
    points, ratio = record["conversion"]["points"], record["conversion"]["perplexity_ratio"]
    assert ratio["value"] == pytest.approx(points["healed"]["perplexity"] / points["original"]["perplexity"], abs=2e-4)
    assert ratio["windows"] == 8 and ratio["interval"][0] < ratio["value"] < ratio["interval"][1]
    apart = points["original"]["perplexity_interval"]  # of which windows have most: that of pairs is smaller
    assert ratio["interval"][1] / ratio["interval"][0] < apart[1] / apart[0]
    tables = [(directory / f"{name}windows.tsv").read_text().splitlines() for name in ("original.", "")]
    assert len(tables[0]) == len(tables[1]) == 9 and tables[0] != tables[1]
    assert (directory / "original.predictions.tsv").is_file()
    assert not foreign(directory)
    low, high = points["original"]["needle"]["accuracy_interval"]
    assert 0 <= low <= points["original"]["needle"]["accuracy"] <= high <= 1


def test_a_conversion_that_is_refused_is_refused_before_anything_is_scored(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[Any] = []

    def refused(*arguments: Any) -> Any:
        raise DataError("refused")

    monkeypatch.setattr(task, "converted_copy", refused)
    monkeypatch.setattr(LanguageModellingTask, "scored", lambda *arguments: scored.append(arguments))
    for mode, settings in ((convert, ["mode=convert"]), (train, [])):
        with pytest.raises(DataError, match="^refused$"):
            recorded(mode, start("convert=mla", "convert.keep=0.5", *settings), tmp_path / mode.__name__)
    assert not scored


def test_a_first_answer_has_both_models_side_by_side(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["experiment=convert/quick", f"model='{model}'", "hardware=cpu", f"cache_dir='{tmp_path / 'cache'}'"]
    few = ["task.score.prompt_tokens=8", "task.sampling.tokens=8", "task.score.needle.trials=2", *CALIBRATION]
    few += ["task.score.needle.lengths=[96]"]
    cfg = check([*words, *few], load).jobs[0]
    record = recorded(convert, (cfg, new(cfg, "test")), tmp_path / "run")
    assert (record["scale"], cfg.task.data.window, cfg.convert.layers) == ("pretrained", 96, "budget")
    assert 1 < record["conversion"]["perplexity_ratio"]["windows"] <= 20
    assert "at most 20 of them" in record["quality"]["signature"]
    shown = " ".join(capsys.readouterr().out.split())
    for words_shown in ("original", "converted", "perplexity over the original's", "needle", "(95 %:", "ref", "hyp"):
        assert words_shown in shown


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wikitext103", "ptb", "lm1b", "fineweb_edu"])
def test_every_language_task_scores_a_model_on_its_sample(name: str, model: Path, tmp_path: Path) -> None:
    words = [f"task={name}", "mode=test", f"model='{model}'", "hardware=cpu", f"cache_dir='{tmp_path / 'cache'}'"]
    few = ["task.score.continuations=1", "task.score.prompt_tokens=8", "task.sampling.tokens=8"]
    cfg = check([*words, *few], load).jobs[0]
    record = recorded(test, (cfg, new(cfg, "test")), tmp_path / "run")
    low, high = record["quality"]["perplexity_interval"]
    assert low < record["quality"]["perplexity"] < high and "disjoint windows of 96" in record["quality"]["signature"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_conversion_is_healed_on_a_gpu(start: Start, tmp_path: Path) -> None:
    words = ("hardware.accelerator=gpu", "hardware.precision=32-true")
    record = recorded(train, start("convert=mla", "convert.keep=0.5", *words), tmp_path)
    points = record["conversion"]["points"]
    assert all(points[name]["perplexity"] > 1 for name in ("original", "converted", "healed"))


def test_half_of_the_calibration_texts_have_facts_that_the_needle_never_asks_for(start: Start) -> None:
    cfg, record = start("convert=mla", "convert.calibration.window=96", "convert.calibration.tokens=3840")
    data, _ = LanguageModellingTask(cfg).prepare(record, None)
    tokens, about = calibration_tokens(Calibration(tokens=3840, window=96), data)
    plain, _ = calibration_tokens(Calibration(tokens=3840, window=96, facts=0.0), data)
    changed = (tokens != plain).any(1)
    assert changed.sum() == 20 and "20 of 40 texts with facts" in about
    texts = [data.vocabulary.text(row.tolist()) for row in tokens[changed]]
    names = [re.findall(r"\b[A-Z][a-z]{8}\b", text) for text in texts]
    assert any(len(found) > len({*found}) for found in names), "none is repeated"
    assert not {name for found in names for name in found} & {*NAMES}
    assert 0 < sum(bool(re.match(r" The [a-z]+ (that|of|for) [A-Z]", text)) for text in texts) < 15, "at once"


def test_a_record_has_the_losses_of_conversion_and_healing(healed: tuple[Path, dict[str, Any]]) -> None:
    directory, record = healed
    json.dumps(record)
    about = record["conversion"]
    assert record["attention"] == "mla"  # what decodes now
    assert (about["target"], about["calibration"]["tokens"]) == ("mla", 256)
    assert sum(layer["rope_dim"] + layer["latent_dim"] for layer in about["layers"]) == 2 * 16
    assert all(0 <= layer["output_error"] < 1 for layer in about["layers"])
    original, converted, after = (about["points"][name] for name in ("original", "converted", "healed"))
    assert converted["cache_bytes_per_token"] == original["cache_bytes_per_token"] / 2
    for point in (original, converted, after):
        assert point["cache_bytes_measured"] == point["cache_bytes_predicted"] and point["perplexity"] > 1
        assert [(cell["length"], cell["depth"]) for cell in point["needle"]["cells"]] == [(72, 0.5), (96, 0.5)]
    assert record["quality"]["perplexity"] == after["perplexity"] and record["quality"]["needle"] == after["needle"]
    assert original["needle"]["gain"] != converted["needle"]["gain"] != after["needle"]["gain"]
    assert record["training"]["steps"] == 4
    assert [node["_target_"] for node in read_layers(directory / CONVERSION)] == ["attnlab.attention.MLA"] * 2
    stored = {name: value for name, value in about.items() if name not in ("recall", "perplexity_ratio")}
    assert read_about(directory / CONVERSION) == stored | {"points": about["points"] | {"healed": "not run"}}
    assert about["recall"] == {name: point["needle"]["accuracy"] for name, point in about["points"].items()}
    assert not list((Path(record["config"]["cache_dir"]) / STORED).iterdir())  # needed by an interrupted run alone


def test_the_run_is_used_as_any_other(
    healed: tuple[Path, dict[str, Any]], model: Path, tmp_path: Path, capsys: Any
) -> None:
    directory, record = healed
    weights = directory / "checkpoints" / "averaged.safetensors"
    for path in (directory, weights):
        assert recorded(test, used(path, "test"), tmp_path)["quality"] == record["quality"]
    after, before = load_file(weights), load_file(model / "model.safetensors")  # attention alone was trained
    assert torch.equal(after["layers.0.up.weight"], before["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(after["embedding.weight"], before["model.embed_tokens.weight"])
    recorded(generate, used(directory, "generate", "prompt=src", "task.sampling.tokens=4"), tmp_path)
    assert capsys.readouterr().out
    assert len(attnlab.load(directory).predict(["mefo damo"])) == 1


def test_layers_of_another_architecture_are_not_continued(start: Start) -> None:
    """Rotary frequencies, norms and windows are in no weight."""
    cfg, _ = start("mode=convert", "convert=gqa")
    other = copy.deepcopy(cfg)
    OmegaConf.set_readonly(other, False)
    other.attention.rope_theta = 300.0
    places = {converted_copy(each, ToGQA(), exact("llama"), tokens(2, 8), "")[3] for each in (cfg, other)}
    assert len(places) == 2


def test_a_model_is_used_without_a_run(
    start: Start, healed: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = recorded(test, start("mode=test"), tmp_path)
    assert record["attention"] == "gqa"
    assert record["quality"]["perplexity"] == healed[1]["conversion"]["points"]["original"]["perplexity"]
    capsys.readouterr()
    record = recorded(generate, start("mode=generate", "prompt=src", "task.sampling.temperature=0"), tmp_path)
    assert capsys.readouterr().out.startswith("src") and record["generation"]["tokens"] == 8


def test_describe_knows_the_cache_without_weights(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sizes.json"
    settings = ("convert=mtla", "convert.keep=0.5", "stride=4", "mode=describe", f"output='{file}'")
    record = recorded(describe, start(*settings), None)
    describe.show(record)  # no terminal: the file alone
    assert capsys.readouterr().out == "" and json.loads(file.read_text())["kv_cache"] == record["kv_cache"]
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "isatty", lambda: True)
        describe.show(record)
    shown = capsys.readouterr().out
    (cache,) = [line for line in shown.splitlines() if "elements per token" in line]
    assert re.findall(r"[\d,]+", cache) == ["32", "4"] and "original" in shown and "{" not in shown
    assert record["kv_cache"]["elements_per_token_per_layer"] == 4
    beside = record["kv_cache"]["original"]
    cfg, record = start("mode=describe")
    describe.run(cfg, record, None)
    assert (cfg.choices.attention, record["kv_cache"]["elements_per_token_per_layer"]) == ("gqa", 32)
    assert beside == {key: record["kv_cache"][key] for key in beside} and "original" not in record["kv_cache"]


@pytest.mark.slow
def test_a_healing_that_stops_continues(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the layers that were converted before it stopped, and the same teacher."""
    settings = ("convert=mla", "convert.keep=0.5", "task.train.validate_every=2")
    recorded(train, start(*settings), tmp_path / "whole")
    step = Healed.training_step

    def stopped(self: Healed, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 3:
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    monkeypatch.setattr(Healed, "training_step", stopped)
    cfg, record = start(*settings)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        recorded(train, (cfg, record), tmp_path / "parts")
    assert len(list((Path(cfg.cache_dir) / STORED).glob("*/layer-*"))) == 2
    points = record["conversion"]["points"]
    monkeypatch.undo()
    monkeypatch.setattr(markov, "LINES", {"train": 200, "validation": 20, "test": 20})
    cfg = check([f"resume='{tmp_path / 'parts'}'"], load).jobs[0]
    record = recorded(train, (cfg, new(cfg, "test")), tmp_path / "parts")
    assert record["training"]["resumed"] and record["training"]["steps"] == 4
    assert record["conversion"]["points"] == points | {"healed": record["conversion"]["points"]["healed"]}
    assert record["conversion"]["points"]["healed"]["perplexity"] == record["quality"]["perplexity"]
    first, second = (load_file(tmp_path / run / "checkpoints" / "averaged.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_mode_convert_trains_nothing_and_exports(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder with code that transformers loads, and DeepseekV3 without code."""
    run = tmp_path / "run"
    caplog.set_level("INFO", "attnlab")
    settings = ("convert=mla", "convert.keep=0.5", "convert.layers=same")
    record = recorded(convert, start(*settings, "mode=convert"), run)
    assert record["conversion"]["points"]["healed"] == "not run" and record["training"]["steps"] == "not run"
    assert "expected: about 1 min, an estimate" in caplog.text and "windows of 16 tokens" in caplog.text
    module: Any = attnlab.load(run)
    model: Decoder = module.module.model
    assert all(isinstance(attention, MLA) for attention in model.attentions)
    ids = torch.randint(257, (2, 20), generator=torch.Generator().manual_seed(0))
    for format in ("hf", "deepseek"):
        loaded = exported(run, f"format={format}", trust_remote_code=format == "hf")
        with torch.no_grad():
            assert torch.allclose(loaded(ids).logits, model(ids), atol=1e-4)
    assert "vLLM's kernels for latents take" in caplog.text


@pytest.mark.slow
def test_sliding_windows_are_kept_up_to_generate_of_transformers(start: Start, tmp_path: Path) -> None:
    """Qwen2 without a window in the first layer; the second layer's cache does not grow with the text."""
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    folder, run = written(tmp_path / "qwen2", {**SIZES, "model_type": "qwen2", **windows}), tmp_path / "run"
    settings = (f"model='{folder}'", "convert=mla", "convert.keep=0.5")
    record = recorded(convert, start(*settings, "mode=convert"), run)
    points = record["conversion"]["points"]
    for point in (points["original"], points["converted"]):
        assert point["cache_bytes_measured"] == point["cache_bytes_predicted"] and point["perplexity"] > 1
    assert 2 * points["converted"]["cache_bytes_measured"] == points["original"]["cache_bytes_measured"]
    kinds = [(node["_target_"].rpartition(".")[2], node.get("window")) for node in read_layers(run / CONVERSION)]
    assert kinds == [("MLA", None), ("MLAWindow", 6)]
    module: Any = attnlab.load(run)
    model: Decoder = module.module.model
    loaded = exported(run, trust_remote_code=True)
    ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(0))
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), ids), 1)
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, model(ids), atol=1e-4)
        generated = loaded.generate(
            padded, attention_mask=(torch.arange(23) >= 3).long().expand(2, -1), max_new_tokens=12,
            do_sample=False, return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert generated.sequences[:, 23:].equal(Sampling(tokens=12, temperature=0)(model, ids))
    sizes = [(first.capacity, second.nbytes) for first, second in [generated.past_key_values.rows[0].caches]]
    assert sizes == [(31, 4 * model.attentions[1].cache_elements(2, 6))]  # the padding is not held
    with pytest.raises(ConfigError, match="DeepseekV3 has no sliding windows"):
        exported(run, "format=deepseek")


def test_a_model_that_keeps_its_attention_is_written_back(start: Start, model: Path, tmp_path: Path) -> None:
    settings, run = ("task.train.max_steps=1", "task.train.batch.tokens=64", "task.optimizer.lr=0.0"), tmp_path / "run"
    recorded(train, start(*settings), run)
    loaded, dense = exported(run), huggingface.load(str(model))
    assert type(loaded) is type(dense)
    ids = torch.randint(257, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, dense(ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convert=mla", "attention=mtla"], "the pretrained model decides it"),
        (["convert=mla", "task.model.d_model=8"], "the pretrained model decides it"),
        (["convert=mlp"], "no such convert"),
        (["mode=convert"], "mode=convert needs convert=<method>"),
        (["convert=tpa", "stride=2"], "has no stride"),
        (["convert=mla", "mode=generate"], "mode=generate with convert=mla: a model is converted by mode=convert"),
        (["convert=mla", "convert.healing.tokens=100"], "^convert.healing.tokens=100: expected"),
        (["convert=mla", "task=mustc"], "convert=mla: task=mustc has no pretrained decoder"),
        (["task=wmt16"], "task=wmt16 trains from random weights"),
    ],
)
def test_what_is_wrong_is_one_line(words: list[str], message: str, model: Path) -> None:
    other = [word for word in words if word.startswith("task=")]
    arguments = words if "convert=mla" in words and other else [f"model='{model}'", *words]
    with pytest.raises(ConfigError, match=message):
        check(arguments if other else [*TINY, *arguments], load)


def test_calibration_windows_are_at_most_the_positions_of_the_model(start: Start, tmp_path: Path) -> None:
    """By default; a longer one that is given is refused."""
    words = [*TINY, "convert=mla"]
    assert check([*words, f"model='{written(tmp_path, SIZES)}'"], load).jobs[0].convert.calibration.window == 96
    cfg, _ = start("convert=mla", "convert.calibration.window=97")
    with pytest.raises(ConfigError, match="window=97: expected at most the model's 96 positions"):
        LanguageModellingTask(cfg).check(tmp_path)


def test_the_scored_text_is_no_calibration_text(start: Start, tmp_path: Path) -> None:
    cfg, _ = start("convert=mla")
    from attnlab.config.build import instantiate

    data: Any = instantiate(cfg.task.data, path="task.data")
    data.setup(None)
    held_out = data.source.files(data.root, "test")[0]
    short, other = tmp_path / "short.txt", tmp_path / "other.txt"
    short.write_text("few words")
    other.write_text(data.source.files(data.root, "train")[0].read_text()[:9000])
    for file, message in ((held_out, "that is the test split"), (short, "9 tokens, less than")):
        with pytest.raises(DataError, match=message):
            calibration_tokens(Calibration(file=str(file), tokens=8000, window=32), data)
    assert calibration_tokens(Calibration(file=str(other), tokens=8000, window=32), data)[0].numel() == 8000


def test_damaged_layers_are_named_before_the_corpus_is_read(
    healed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Nothing that the file names is imported or called."""
    (tmp_path / "config.yaml").write_text((healed[0] / "config.yaml").read_text())
    content = json.loads((healed[0] / CONVERSION).read_text())
    first, second = content["layers"]
    cfg, _ = used(tmp_path, "test", f"data_root='{tmp_path}'")  # no corpus
    path = tmp_path / CONVERSION
    cases: list[tuple[dict[str, Any] | None, str]] = [
        ({"latent_dim": -8}, "latent_dim=-8"),
        ({"latent_dim": "a"}, "layer 1: attention.latent_dim=a: expected int"),
        ({"latent_dim": "${oc.env:HOME}"}, "layer 1: has an interpolation"),
        ({"_partial_": True}, "layer 1: has an interpolation or _partial_"),
        ({"bias": {"_target_": "os.system", "command": "true"}}, "layer 1: attention.bias._target_=os.system"),
        ({"foo": 1}, "layer 1: attention.foo: attnlab.attention.MLA has no parameter 'foo'"),
        ({"_target_": "attnlab.attention.Nope"}, "layer 1: attention._target_=attnlab.attention.Nope: no such class"),
        ({"_target_": "attnlab.bench.baselines.of"}, "attnlab.bench.baselines.of is no mechanism"),
        ({"num_heads": 10**8}, "num_heads=100000000: expected int >= 1 and <= 1048576"),
        ({"latent_dim": 10**12}, "latent_dim=1000000000000: expected int"),
        (None, "has 1 layer, and"),
    ]
    for change, message in cases:
        layers = [first] if change is None else [first, second | change]
        path.write_text(json.dumps(content | {"layers": layers}))
        with pytest.raises(DataError, match=f"^{re.escape(str(path))}: .*{message}"):
            LanguageModellingTask(cfg).check(tmp_path)
    for text in ("", "{}", "[" * 100_000, '{"layers": [{"_target_": "os.system"}]}', '{"layers": [1]}'):
        path.write_text(text)
        with pytest.raises(DataError, match=CONVERSION):
            read_layers(path)
    path.write_text(json.dumps(content))
    LanguageModellingTask(cfg).check(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="no such file; expected the layers of the converted model"):
        LanguageModellingTask(cfg).check(tmp_path)


@pytest.mark.parametrize("measure", [Teacher.layer_errors, Teacher.divergence])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(measure: Any) -> None:
    original = decoder_of(reference("llama"))
    tokens, student = torch.randint(96, (2, 9)), copy.deepcopy(original)
    teacher = Teacher(copy.deepcopy(original), tokens)

    def measured(rows: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = measure(teacher, student, rows, lambda method: method)
        return values

    assert measured(tokens).shape == (2, 9) and float(measured(tokens).detach().abs().max()) < 1e-6
    with torch.no_grad():
        student.attentions[1].out.weight.mul_(1.5)  # type: ignore[union-attr,operator]
        alone = [measured(row) for row in tokens.split(1)]  # processes and batches may share the rows in any way
        assert torch.allclose(torch.cat(alone), measured(tokens), rtol=1e-5, atol=1e-6)
    values = measured(tokens)
    assert float(values.detach().min()) > -1e-6 and float(values.detach().max()) > 1e-4


@pytest.mark.parametrize("objective", [pytest.param("layers", marks=pytest.mark.slow), "logits"])
def test_healing_is_compiled_as_training_is(objective: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses and gradients by compiled parts of student and teacher; attention alone is trained."""
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return graph.forward

    def compile(method: Any, dynamic: bool | None) -> Any:
        compiled.append(method.__name__)
        return torch._dynamo.optimize(backend, nopython=True)(method)

    torch._dynamo.reset()
    original, results = decoder_of(reference("llama")), []
    student = copy.deepcopy(original)
    with torch.no_grad():
        student.attentions[0].out.weight.mul_(1.5)  # type: ignore[union-attr,operator]
    monkeypatch.setattr(torch, "compile", compile)
    tokens = torch.randint(96, (2, 9))
    for on in (False, True):
        healed = Healed(
            copy.deepcopy(student), BytePairVocabulary(byte_tokenizer().to_str(), 257, "after"),
            healing=Healing(objective=[objective]), compile=on, optimizer=torch.optim.SGD,
            schedule=torch.optim.lr_scheduler.ConstantLR, identity={}, seed=1,
        ).train()  # fmt: skip
        healed.teacher[:] = [Teacher(copy.deepcopy(original), tokens)]
        loss = healed.losses((tokens, tokens))[0]
        loss.backward()
        gradients = {name: p.grad for name, p in healed.model.named_parameters() if p.grad is not None}
        assert {name.split(".")[2] for name in gradients} == {"attention"}
        results.append([loss.detach(), *gradients.values()])
    assert compiled == (["attention_pairs", "attended"] if objective == "layers" else ["log_probabilities"] * 2)
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_a_converted_model_has_codes_in_its_cache_and_the_original_has_none(start: Start, tmp_path: Path) -> None:
    run = "mode=convert", "convert=mla", "task.data.eval_window=80", "task.score.prompt_tokens=80"
    points = [
        recorded(convert, start(*run, *more), tmp_path / str(len(more)))["conversion"]["points"]
        for more in ((), ("cache.bits=4",))
    ]
    exact, coded = (point["converted"] for point in points)
    assert points[0]["original"]["perplexity"] == points[1]["original"]["perplexity"]
    assert coded["cache_bits"] == 4 and "cache_bits" not in points[1]["original"]
    assert exact["perplexity"] != coded["perplexity"] == pytest.approx(exact["perplexity"], rel=0.05)
    assert coded["cache_bytes_per_token"] < exact["cache_bytes_per_token"] / 3
    assert coded["cache_bytes_measured"] == coded["cache_bytes_predicted"] < exact["cache_bytes_measured"]
