"""Recognition from all layers of a tiny WavLM with random weights: stored, mixed, trained, decoded, used."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file
from transformers import WavLMConfig, WavLMModel

import attnlab
from attnlab.config.check import compose
from attnlab.data import Kaldi
from attnlab.data.speech.extract import extract, pretrained
from attnlab.errors import ConfigError, DataError
from attnlab.modes import test, train
from attnlab.run.record import new
from attnlab.tasks.base import task_of
from attnlab.tasks.sequence_to_text.task import SequenceToTextTask
from tests.data.layouts import audio, write
from tests.run.test_identity import changed
from tests.tasks.conftest import predictions, recorded

TEXTS = {"a": "ONE TWO", "b": "TWO", "c": "ONE"}
TINY = [  # the published overlay, over less of everything
    "experiment=mtla/table3", "attention=mtla", "hardware=cpu", "task.model.d_model=16", "task.attention_heads=2",
    "task.data.features.width=16", "task.data.features.layers=3", "task.model.encoder.num_mels=16",
    "task.model.encoder.mix_layers=3", "task.model.encoder.projection_dim=8", "task.model.encoder.num_layers=1",
    "task.model.encoder.num_heads=2", "task.model.encoder.ffn_dim=16", "task.model.encoder.conv_channels=16",
    "task.model.decoder.num_layers=1", "task.model.decoder.ffn_dim=16", "task.model.decoder.projector_dim=8",
    "task.data.hard_vocab_limit=false", "task.data.vocab_size=20", "task.data.ctc_vocab_size=20",
    "task.data.max_input_frames=60", "task.train.batch.frames=60", "task.train.batch.bucket=60",
    "task.train.max_steps=-1", "task.train.max_epochs=1", "task.schedule.warmup_steps=1", "task.optimizer.lr=0.02",
    "task.decode.max_len_b=8", "task.decode.beam=2", "task.decode_max_frames=60", "task.data.augment.time_warp=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layers of a random WavLM for three utterances of each split."""
    folder = tmp_path_factory.mktemp("layers")
    torch.manual_seed(0)
    config = WavLMConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, conv_dim=(8,) * 7,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_buckets=8, max_bucket_distance=16,
    )  # fmt: skip
    WavLMModel(config).save_pretrained(folder / "wavlm")
    for split in Kaldi.splits:
        write(folder / "corpus" / split / "text", *(f"{id} {text}" for id, text in TEXTS.items()))
        files = [audio(folder / "corpus" / f"{id}.wav", 0.4 + 0.1 * i) for i, id in enumerate(TEXTS)]
        write(folder / "corpus" / split / "wav.scp", *(f"{id} {file}" for id, file in zip(TEXTS, files, strict=True)))
    extract(Kaldi(), folder / "corpus", folder / "stored", pretrained(str(folder / "wavlm"), "all", "cpu"), (1.0,), {})
    return folder / "stored"


@pytest.fixture(scope="module")
def cfg(features: Path, tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    return compose(*TINY, f"data_root={features}", f"cache_dir={tmp_path_factory.mktemp('cache')}")


def test_training_learns_the_mix_and_decodes(cfg: DictConfig, features: Path, tmp_path: Path) -> None:
    stored = np.load(features / "train" / "feats" / "a.npy")
    assert stored.shape == (19, 3, 16) and stored.dtype == np.float16
    record = recorded(train, (cfg, new(cfg, "test")), tmp_path / "run")
    weights = load_file(tmp_path / "run" / "checkpoints" / "averaged.safetensors")["encoder.mix.weights"]
    assert weights.abs().min() > 1e-5  # they were zero: every layer's weight has had gradients
    shares = record["front_end"]["layer_shares"]
    assert shares == pytest.approx(weights.softmax(0).tolist(), abs=1e-4) and len(shares) == 3
    assert record["quality"]["sentences"] == 3
    json.dumps(record)
    tested = changed(cfg, mode="test", checkpoint=str(tmp_path / "run"))
    again = recorded(test, (tested, new(cfg, "test")), tmp_path / "again")
    assert (again["quality"], again["front_end"]) == (record["quality"], record["front_end"])
    known = [row for row in predictions(tmp_path / "run") if "⁇" not in row["hypothesis"]]  # never predicted
    assert known
    model = attnlab.load(tmp_path / "run")
    for row in known:
        file = features / "eval" / "feats" / f"{row['id']}.npy"
        assert model.predict(str(file)) == {"prediction": row["hypothesis"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task__model__encoder__mix_layers": None}, "mix_layers=None, but .* has layers=3"),
        ({"task__data__features__layers": None}, "mix_layers=3, but .* has layers=None"),
        ({"task__data__features__normalize": True}, "task.data.features.layers=3: expected deltas=0 and normalize=f"),
    ],
)
def test_an_encoder_for_other_layers_is_refused(
    cfg: DictConfig, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        task_of(changed(cfg, **changes), SequenceToTextTask).check(tmp_path)


def test_stored_features_without_a_corpus_are_refused_before_a_sample_is_made(
    cfg: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlab.data.AMI.sample", lambda *_: pytest.fail("a sample corpus was made"))
    none = changed(cfg, task__data__root=None)
    with pytest.raises(ConfigError, match="^data_root=null: .*stored features"):
        task_of(none, SequenceToTextTask).prepare(new(none, "test"), None)


def test_files_with_other_layers_are_named(cfg: DictConfig, features: Path, tmp_path: Path) -> None:
    four = changed(cfg, task__data__features__layers=4, task__model__encoder__mix_layers=4)
    with pytest.raises(DataError, match=r"a.npy: features of shape \(19, 3, 16\), expected \(frames, 4, 16\)"):
        task_of(four, SequenceToTextTask).prepare(new(four, "test"), None)
    shutil.copytree(features, tmp_path / "one")
    np.save(tmp_path / "one" / "train" / "feats" / "b.npy", np.zeros((24, 16), np.float16))
    single = changed(cfg, task__data__root=str(tmp_path / "one"))
    with pytest.raises(DataError, match=r"b.npy: features of shape \(24, 16\), expected \(frames, 3, 16\): .*layers"):
        task_of(single, SequenceToTextTask).prepare(new(single, "test"), None)
