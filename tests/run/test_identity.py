"""Identity of recipes and runs: settings that count, and settings that do not."""

import copy
import inspect
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from lightning import Trainer
from omegaconf import DictConfig, OmegaConf

from attnlab.attention import MHA, SlidingWindow
from attnlab.config import schema
from attnlab.config.check import compose
from attnlab.config.settings import ABSENT
from attnlab.errors import DataError
from attnlab.run import identity
from attnlab.run.identity import LEFT_OUT, canonical, recipe, run

IMAGES = ("task=imagenet", "compress=irratt")


def changed(cfg: DictConfig, **changes: Any) -> DictConfig:
    """A copy with other values; `__` stands for a dot."""
    cfg = copy.deepcopy(cfg)
    OmegaConf.set_readonly(cfg, False)
    OmegaConf.set_struct(cfg, False)
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, force_add=True)
    return cfg


@pytest.fixture(scope="module")
def mtla() -> DictConfig:
    return compose("attention=mtla")


def weights(path: Path, content: str) -> Path:
    path.write_bytes(b"PK\x03\x04" + content.encode())
    return path


# --- what counts, and what does not -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "same_recipe", "same_run"),
    [
        ("stride=2", True, True),  # the value that it has
        ("hardware=cpu", True, True),
        ("hardware.accelerator=gpu hardware.devices=4 hardware.precision=32-true", True, True),  # auto: bf16-mixed
        ("bench.batch=8", True, True),  # not read in training
        ("tags=[first] logger=tensorboard callbacks=[learning_rate,device_stats]", True, True),
        ("trainer.profiler=simple hardware.gradient_checkpointing=true", True, True),
        ("seed=2", True, False),
        ("mode=describe", True, False),
        ("hardware.precision=bf16-mixed", False, False),
        ("stride=3", False, False),
        ("callbacks=[ema,device_stats]", False, False),
        ("trainer.limit_train_batches=3", False, False),
    ],
)
def test_what_makes_another_recipe_or_run(words: str, same_recipe: bool, same_run: bool, mtla: DictConfig) -> None:
    other = compose("attention=mtla", *words.split())
    assert (recipe(other) == recipe(mtla)) is same_recipe
    assert (run(other, "sample", device="gpu", threads=2) == run(mtla, "sample")) is same_run


def test_two_pretrained_models_are_two_recipes(tmp_path: Path) -> None:
    first, second = weights(tmp_path / "a.safetensors", "one"), weights(tmp_path / "b.safetensors", "two")
    settings = (*IMAGES, f"cache_dir={tmp_path / 'cache'}")
    a, b = (recipe(compose(*settings, f"model={path}")) for path in (first, second))
    assert a != b
    weights(second, "one")
    assert recipe(compose(*settings, f"model={second}")) == a  # the content counts, not the path
    hub = compose(*settings, "model=deit_small_patch16_224.fb_in1k")
    assert canonical(hub)["task"]["model"]["weights"] == "deit_small_patch16_224.fb_in1k"  # as written, not fetched
    assert recipe(hub) != recipe(compose(*settings, "model=deit_small_patch16_224.fb_in22k"))


def test_random_starts_of_a_decomposition_follow_the_seed() -> None:
    """Two seeds are one recipe, unless the starts have another seed; older runs had none."""
    words = (*IMAGES, "rank=9", "compress.start=random")
    first, second = (compose(*words, f"seed={seed}") for seed in (1, 2))
    assert second.compress.start_seed == 2 and recipe(first) == recipe(second)
    for key, value in (("start_seed", 7), ("restarts", 2), ("start", "cp")):
        assert recipe(changed(first, **{f"compress__{key}": value})) != recipe(first)
    today = changed(second, compress__start="cp")
    older = changed(today)
    for key in ("start_seed", "restarts", "vo", "keep_of"):
        del older.compress[key]
    assert recipe(older) == recipe(today) and identity.architecture(older) == identity.architecture(today)


def test_each_bench_of_a_sweep_is_a_run() -> None:
    small, large = (compose("mode=bench", f"bench.batch={batch}") for batch in (4, 8))
    assert recipe(small) == recipe(large)
    machines = [(small, "cpu", 1), (large, "cpu", 1), (small, "cpu", 2), (small, "gpu", 1)]
    assert len({run(cfg, "none", device=device, threads=threads) for cfg, device, threads in machines}) == 4


def test_two_corpora_are_two_runs_of_one_recipe(tmp_path: Path) -> None:
    unset, real = compose(*IMAGES, "rank=8"), compose(*IMAGES, "rank=8", f"data_root={tmp_path}")
    assert recipe(unset) == recipe(real)
    assert run(unset, "sha256:one") != run(real, "sha256:two") == run(unset, "sha256:two")


def test_training_and_testing_one_model(tmp_path: Path, mtla: DictConfig) -> None:
    paths = [weights(tmp_path / f"{name}.safetensors", name) for name in ("averaged", "other")]
    cache = f"cache_dir={tmp_path / 'cache'}"
    test, again = (compose("attention=mtla", "mode=test", f"checkpoint={path}", cache) for path in paths)
    assert recipe(test) == recipe(mtla) == recipe(again)
    assert len({run(test, "c"), run(mtla, "c"), run(again, "c")}) == 3


def test_what_is_left_out_is_a_key(mtla: DictConfig) -> None:
    """One that was renamed would count again."""
    frozen = (Path(__file__).parents[1] / "golden" / "configurations.txt").read_text()
    lines = frozen.splitlines() + [f"trainer.{name}:" for name in inspect.signature(Trainer).parameters]
    there = {line.partition(":")[0] for line in lines} | set(mtla) | {"hydra", "task.data.cache_dir"}
    for key in LEFT_OUT:
        assert any(f"{name}.".startswith(f"{key}.") for name in map(str, there)), key


def test_any_other_key_counts(mtla: DictConfig) -> None:
    """Also one with the name of a key that is left out, elsewhere."""
    names = {key.rpartition(".")[2] for key in LEFT_OUT} | {"seed", "mode", "bench"}
    nodes = itertools.cycle(("task.model", "attention", "task.optimizer"))
    keys = [f"{node}.{name}" for name, node in zip(sorted(names), nodes, strict=False)]
    keys += ["new", "hardware.new", "task.new", "task.data.new", "task.train.new", "trainer.new"]
    keys += ["task.data.seed"]  # that is no copy of the run's
    before, plain = canonical(mtla), OmegaConf.to_container(mtla, resolve=True)
    for key in keys:
        copied: Any = copy.deepcopy(plain)
        *path, last = key.split(".")
        node = copied
        for part in path:
            node = node.setdefault(part, {})
        node[last] = "x"
        assert canonical(copied) != before, key
    assert recipe(changed(mtla, task__train__clip=10)) == recipe(changed(mtla, task__train__clip=10.0))
    assert recipe(changed(mtla, task__train__clip=10)) != recipe(changed(mtla, task__train__clip="10"))


def test_a_record_has_the_identity_of_its_configuration(mtla: DictConfig, tmp_path: Path) -> None:
    file = weights(tmp_path / "x.safetensors", "w")
    cfg = compose(*IMAGES, f"model={file}", f"cache_dir={tmp_path / 'cache'}")
    stored = json.loads(json.dumps(OmegaConf.to_container(cfg)))
    contents = identity.contents(cfg)
    file.unlink()  # the record is read elsewhere
    assert recipe(stored, contents) == recipe(cfg, contents)
    assert run(stored, "c", contents) == run(cfg, "c", contents)
    assert recipe(json.loads(json.dumps(OmegaConf.to_container(mtla)))) == recipe(mtla)


def test_an_old_run_gets_what_was_added_and_the_tables_stay() -> None:
    """Also where a node was added: its class is named as today, in the copy of the run."""
    tables = copy.deepcopy(ABSENT)
    old: dict[str, Any] = {"task": {"score": {"_target_": "attnlab.tasks.language_modelling.score.LanguageScore"}}}
    needles = [identity.current(copy.deepcopy(old))["task"]["score"]["needle"] for _ in range(2)]
    assert needles[0] == needles[1] and needles[0]["lengths"] is None
    assert needles[0]["_target_"] == "attnlab.tasks.language_modelling.needle.Needle"
    assert tables == ABSENT and identity.renamed(identity.current(copy.deepcopy(old))) == identity.renamed(old)


def test_a_score_without_a_tokenizer_is_that_of_an_older_record(mtla: DictConfig) -> None:
    old = changed(mtla, task__score="bleu")
    assert recipe(mtla) == recipe(old) != recipe(changed(mtla, task__score__tokenize="zh"))
    assert identity.current(OmegaConf.to_container(old))["task"]["score"] == {"name": "bleu", "tokenize": None}  # type: ignore[arg-type]


# --- names that change --------------------------------------------------------------------------------------------


def test_a_class_that_moves_keeps_its_identity(mtla: DictConfig) -> None:
    """By the name that a package gives it, by its module, and by a module of an older tree."""
    for path in ("attnlab.attention.MTLA", "attnlab.attention.mtla.MTLA", "attnlab.attention.older.MTLA"):
        assert recipe(changed(mtla, attention___target_=path)) == recipe(mtla)
    for other in ("attnlab.attention.MLA", "attnlab.attention.older.Other", "custom.MTLA"):
        assert recipe(changed(mtla, attention___target_=other)) != recipe(mtla)


def test_no_two_classes_of_configurations_have_one_name() -> None:
    """Runs of the two could not be told apart."""
    frozen = (Path(__file__).parents[1] / "golden" / "configurations.txt").read_text()
    targets = set(re.findall(r'_target_: "([\w.]+)"', frozen))
    ours = [target for target in targets if target.startswith("attnlab.")]
    modules = schema.modules_of_names()
    assert ours and all(len(modules[identity.stable_name(name).partition(".")[0]]) == 1 for name in ours)
    for foreign in ("custom.one.Same", "torch.optim.Adam"):
        assert identity.stable_name(foreign) == foreign


def test_what_is_added_keeps_identities(mtla: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    new: dict[str, Any] = {
        "task": {"train": {"clip": 1.0, "added": None}, "decode": {"_target_": "attnlab.decoding.BeamSearch"}},
        "attention": {"_target_": "MTLA", "stride": 2, "bias": False},
    }
    old: dict[str, Any] = {
        "task": {"train": {"clip": 1}, "decode": {"_target_": "attnlab.decoding.beam.BeamSearch"}},
        "attention": {"_target_": "attnlab.attention.MTLA", "stride": 2},
    }
    monkeypatch.setattr(identity, "ABSENT", {"MTLA": {"bias": False}, "task.train": {"added": None}})
    assert canonical(old) == canonical(new) == canonical(canonical(new))
    assert canonical(changed(mtla, attention__bias=True)) != canonical(mtla)
    assert canonical(changed(mtla, task__model__bias=False)) != canonical(mtla)  # a parameter of another class


@pytest.mark.parametrize("mechanism", [MHA, SlidingWindow])
def test_a_default_that_is_written_out_is_the_same_recipe(mtla: DictConfig, mechanism: type) -> None:
    """Options of a mechanism that no file of it has."""
    node = {"_target_": f"attnlab.attention.{mechanism.__name__}", "d_model": 8, "num_heads": 2}
    before = recipe(changed(mtla, attention=node))
    for key in ("qk_norm", "rope_scaling", "norm_eps"):
        default = inspect.signature(mechanism).parameters[key].default
        assert recipe(changed(mtla, attention=node | {key: default})) == before
        assert recipe(changed(mtla, attention=node | {key: "x"})) != before


# --- checkpoints --------------------------------------------------------------------------------------------------


def test_an_old_checkpoint_has_the_identity_of_today(mtla: DictConfig) -> None:
    node = OmegaConf.to_container(mtla.attention)
    assert isinstance(node, dict)
    old = {"mechanism": node | {"_target_": "attnlab.attention.mtla.MTLA", "dropout": 0.5}, "vocabulary": "abc"}
    today, wanted = identity.of_checkpoint(old), identity.architecture(mtla)
    assert today["mechanism"] == wanted["mechanism"] and today["vocabulary"] == "abc"
    assert identity.of_checkpoint(today) == today
    assert identity.architecture(compose("attention=mha"))["mechanism"] != wanted["mechanism"]


# --- fingerprints -------------------------------------------------------------------------------------------------


def test_a_corpus_is_its_names_sizes_and_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "LARGEST", 3)
    root, cache = tmp_path / "corpus", tmp_path / "cache"
    files = {name: root / "train" / name for name in ("x.wav", "large.txt", "small.txt")}
    (root / "train").mkdir(parents=True)
    for name, file in files.items():
        file.write_bytes(b"1" if name == "small.txt" else b"1234")
    first = identity.corpus_content(root, cache)
    assert first == "sha256:7141a2e10a2d6b2191a3c2ad3966ef8f340d3ee8c29851968f7ea977caba7368"  # stored in records
    changes = [
        ("x.wav", b"4321", False),  # recordings and large files: name and size
        ("x.wav", b"12345", True),
        ("large.txt", b"4321", False),
        ("large.txt", b"12345", True),
        ("small.txt", b"2", True),
        ("y.wav", b"", True),
        (".hidden", b"1", False),
    ]
    for name, content, counts in changes:
        before = identity.corpus_content(root, cache)
        (root / "train" / name).write_bytes(content)  # in place: the folder's time of change stays
        assert (identity.corpus_content(root, cache) != before) is counts, (name, content)
    (root / "train" / "again").symlink_to(root)
    last = identity.corpus_content(root, cache)
    assert identity.corpus_content(root.rename(tmp_path / "elsewhere"), tmp_path / "no cache") == last
    with pytest.raises(DataError, match="cannot be read"):
        identity.corpus_content(tmp_path / "missing", cache)


def test_a_model_folder_is_its_files(tmp_path: Path) -> None:
    """Without hidden ones; of a compressed model alone the files that its manifest names."""
    folder = tmp_path / "model"
    changes = [
        ("config.json", "{}", True),
        ("config.json", '{"a": 1}', True),
        ("1_Dense/model.safetensors", "2", True),
        ("1_Dense/model.safetensors", "23", True),
        (".cache/lock", "x", False),
        ("manifest.json", "{}", True),  # of another program
        ("notes.txt", "x", True),
        ("weights-0.safetensors", "1", True),  # now a compressed model's
        ("notes.txt", "xx", False),
    ]
    before = ""
    for name, text, counts in changes:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        after = identity.weights_content(str(folder), tmp_path / "cache")
        assert (after != before) is counts, (name, text)
        before = after
    assert identity.weights_content("org/model@revision", tmp_path / "cache") == "org/model@revision"
