"""attnlab.load on damaged folders: one line that names what is wrong, and nothing of the folder is run."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf

import attnlab
from attnlab.config.check import compose
from attnlab.errors import ConfigError, DataError
from attnlab.export import language
from attnlab.modes import train
from attnlab.run.record import new, write
from tests.export.trained import WORDS, config, model_of, record
from tests.golden.runs import LANGUAGE, corpus
from tests.pretrained.tiny import saved

TEXTS = ("[" * 100_000, '{"a":' * 50_000, "null", "[]", "{}", "3", '"x"', "NaN", "\ufeff{}", "- a", "a: &a [*a]")
VALUES: tuple[Any, ...] = (None, "x", -1, 0, float("nan"), [], {}, [1, 2], "${seed}", "../../x", 2.5, 10**9)
Damage = Callable[[Path], object]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


def replaced(path: Path) -> None:
    path.unlink()
    path.mkdir()


def linked(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def damages(path: Path) -> Iterator[tuple[str, Damage]]:
    data = path.read_bytes()
    yield "missing", Path.unlink
    yield "a folder", replaced
    yield "a link to itself", linked
    yield "empty", lambda file: file.write_bytes(b"")
    yield "cut short", lambda file: file.write_bytes(data[: len(data) // 2])
    yield "zeros", lambda file: file.write_bytes(bytes(len(data)))
    yield "foreign", lambda file: file.write_bytes(random.Random(1).randbytes(500))
    yield "a pickle", lambda file: torch.save({"state_dict": Evil(), "identity": {}}, file)
    if path.suffix in (".json", ".yaml"):
        for text in TEXTS:
            yield text[:9], lambda file, text=text: file.write_text(text)  # type: ignore[misc]


def changes(path: Path, keys: list[str]) -> Iterator[tuple[str, Damage]]:
    """A value of another kind for each key of a JSON or YAML file."""
    for number, key in enumerate(keys):
        value = VALUES[number % len(VALUES)]

        def change(file: Path, key: str = key, value: Any = value) -> None:
            content = yaml.safe_load(path.read_text())
            *groups, last = key.split(".")
            node = content
            for group in groups:
                node = node[group]
            node[last] = value
            file.write_text(json.dumps(content))

        yield f"{key}={value}", change


def refused(folder: Path, work: Path, path: Path, cases: Iterator[tuple[str, Damage]]) -> tuple[int, int]:
    """The number of damaged copies of a folder, and of those that were refused. Anything but one line fails."""
    counts = [0, 0]
    for name, damage in cases:
        copy = shutil.copytree(folder, work / "copy")
        (copy / "checkpoints" / "SHA256SUMS").unlink(missing_ok=True)
        damage(copy / path.relative_to(folder))
        try:
            attnlab.load(copy, *(["hardware=cpu"] if (copy / "config.yaml").exists() else []))
        except (ConfigError, DataError) as error:
            assert "\n" not in str(error) and str(copy) in str(error), f"{path.name}, {name}: {error}"
            counts[1] += 1
        except Exception as error:
            pytest.fail(f"{path.name}, {name}: {type(error).__name__}: {error}")
        assert not Path("ran").exists(), f"{path.name}, {name}: it was unpickled"
        counts[0] += 1
        shutil.rmtree(copy)
    return counts[0], counts[1]


def test_a_damaged_exported_folder_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved(folder := tmp_path / "folder")
    attnlab.load(folder)
    counts = [refused(folder, tmp_path, path, damages(path)) for path in sorted(folder.iterdir())]
    config = folder / "config.json"
    counts.append(refused(folder, tmp_path, config, changes(config, list(json.loads(config.read_text())))))
    assert sum(count for count, _ in counts) > 80 and sum(count for _, count in counts) > 60


MODEL = [{"num_layers": -1}, {"num_layers": "x"}, {"max_length": 0}, {"more": 1}, {"output_init": 3}]
MECHANISM = [{"rope_theta": "500"}, {"num_heads": -1}, {"stride": []}, {"dropout": "x"}, {"rope_scaling": {"a": 1}}]
SIZES = ("max_position_embeddings", "num_hidden_layers", "vocab_size", "hidden_size")


@pytest.mark.parametrize("attention", ["mtla", "mha"])  # with classes of attnlab, and of transformers
def test_values_of_an_exported_config_that_cannot_be_are_refused(attention: str, tmp_path: Path) -> None:
    cfg = config(attention)
    language.export(model_of(cfg), cfg, WORDS, record(attention), folder := tmp_path / "exported")
    attnlab.load(folder).predict("w1 w2", tokens=2)
    file = folder / "config.json"
    values = json.loads(file.read_text())
    others: dict[str, tuple[Any, ...]] = dict.fromkeys(SIZES, ("x", [], {}, -1, 0, None, 2.5))
    if attention == "mtla":
        others |= {"mechanisms": ([], {}, None, "x", [[]], [{}], [3]), "model": ([], {}, None, "x", 3)}
    wrong = [(key, {key: value}) for key, several in others.items() for value in several]
    if attention == "mtla":
        wrong += [("model", {"model": values["model"] | change}) for change in MODEL]
        wrong += [("attention", {"mechanisms": [values["mechanisms"][0] | change]}) for change in MECHANISM]
    for key, change in wrong:
        file.write_text(json.dumps(values | change))
        with pytest.raises(DataError, match=rf"config\.json: (\S+ refuses it: .*)?{key}") as error:
            attnlab.load(folder)
        assert "\n" not in str(error.value), change


@pytest.mark.slow
def test_a_damaged_run_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        *LANGUAGE.split(),
        "attention=mtla",
        "task.train.max_steps=1",
        "hardware=cpu",
        f"cache_dir={tmp_path / 'c'}",
    ]
    cfg = compose(*words, f"data_root={corpus('wikitext2', tmp_path / 'text')}")
    record, run = new(cfg, "test"), tmp_path / "run"
    run.mkdir()
    OmegaConf.save(cfg, run / "config.yaml")
    train.run(cfg, record, run)
    write(record | {"status": "finished"}, run)
    attnlab.load(run, "hardware=cpu")
    paths = [run / name for name in ("config.yaml", "vocabulary.json", "checkpoints/averaged.safetensors")]
    counts = [refused(run, tmp_path, path, damages(path)) for path in paths]
    keys = ["task", "task.model", "task.model.d_model", "task.attention_heads", "attention", "attention.stride"]
    keys += [
        "task.data.vocabulary",
        "task.train",
        "choices",
        "choices.task",
        "hardware.precision",
        "attention._target_",
    ]
    counts.append(refused(run, tmp_path, paths[0], changes(paths[0], keys)))
    assert sum(count for count, _ in counts) > 50 and sum(count for _, count in counts) > 40
