import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor

from attnlab.data import MustC, SpecAugment
from attnlab.data.batch import Batch
from attnlab.data.sequence_to_text import SequenceToTextData
from attnlab.errors import ConfigError, DataError
from tests.data.conftest import BANK, Edit, attach

Make = Callable[..., SequenceToTextData]


@pytest.fixture
def make(corpus: Path, tmp_path: Path) -> Make:
    """A data module of the small corpus, with these settings."""

    def build(**settings: Any) -> SequenceToTextData:
        defaults = {"root": str(corpus), "cache_dir": str(tmp_path / "cache"), "features": BANK, "vocab_size": 16}
        settings.setdefault("reader", MustC())
        return SequenceToTextData(**{"update_frames": 3000, **defaults, **settings})

    return build


def ids_of(batch: Batch) -> list[str]:
    return [x.id for x in batch.utterances]


def ids(loader: Any) -> list[str]:
    return [id for batch in loader for id in ids_of(batch)]


def test_batches_equal_the_corpus(make: Make, corpus: Path) -> None:
    data = make(ctc_vocab_size=15)
    data.setup("fit")
    assert data.corpus == f"MuST-C en-de at {corpus}: train 5, dev 5, tst-COMMON 5 segments"
    (batch,) = list(data.val_dataloader())
    assert ids_of(batch) == ["ted_2_1", "ted_1_2", "ted_2_0", "ted_1_0", "ted_1_1"]  # longest first
    references = [x.target for x in batch.utterances]
    assert references == ["sieben zwei eins", "sieben drei", "zwei eins", "eins", "drei"]
    sources = [x.source for x in batch.utterances]
    assert sources == ["seven two one", "seven three", "two one", "one", "three"]
    assert batch.features.dtype == torch.float32
    assert batch.features.shape == (5, 198, 20)
    assert batch.feature_lengths.tolist() == [198, 148, 108, 88, 13]
    assert batch.ctc_targets is not None and batch.ctc_target_lengths is not None and data.ctc_tokenizer is not None
    for i, reference in enumerate(references):
        assert not batch.features[i, batch.feature_lengths[i] :].any()
        length = int((batch.targets[i] != data.tokenizer.pad).sum())
        assert batch.targets[i, length - 1] == data.tokenizer.eos
        assert (batch.targets[i, length:] == data.tokenizer.pad).all()
        assert data.tokenizer.decode(batch.targets[i, : length - 1].tolist()) == reference
        labels = batch.ctc_targets[i, : batch.ctc_target_lengths[i]].tolist()
        assert data.ctc_tokenizer.decode(labels) == sources[i]
        assert min(labels) > data.tokenizer.unk  # neither blank nor </s>
    assert batch.targets.dtype == batch.feature_lengths.dtype == torch.int64


def test_shared_ctc_labels_are_the_targets_of_the_decoder(make: Make) -> None:
    data = make(ctc_vocab_size="shared")
    data.setup("fit")
    (batch,) = list(data.val_dataloader())
    assert data.ctc_tokenizer is data.tokenizer
    assert batch.ctc_targets is not None and batch.ctc_target_lengths is not None
    for labels, count, target in zip(batch.ctc_targets, batch.ctc_target_lengths, batch.targets, strict=True):
        assert [*labels[:count].tolist(), data.tokenizer.eos] == target[target != data.tokenizer.pad].tolist()


def test_a_batch_is_converted_to_the_precision_of_the_run(make: Make) -> None:
    data = make()
    data.setup()
    (batch,) = list(data.val_dataloader())
    wide = DoublePrecision().convert_input(batch)
    assert (wide.features.dtype, wide.targets.dtype) == (torch.float64, torch.int64)
    assert ids_of(wide) == ids_of(batch)


def test_length_filters_are_for_training_and_counted(make: Make) -> None:
    (batch,) = make().val_dataloader()
    tokens = {x.id: len(row[row != 1]) for x, row in zip(batch.utterances, batch.targets, strict=True)}  # 1: <pad>
    limit = tokens["ted_1_0"]
    assert limit < tokens["ted_2_0"]
    data = make(min_input_frames=20, max_input_frames=140, max_target_tokens=limit)
    data.setup()
    assert ids(data.train_dataloader()) == ["ted_1_0"]  # of 88 and 108 frames
    train = data.report.splits["train"]
    assert {reason: note.count for reason, note in train.left_out.items()} == {
        "fewer than 20 frames": 1,
        "more than 140 frames": 2,
        f"more than {limit} target pieces": 1,  # of the others: each counts once
    }
    assert (train.used, train.missing) == (1, 4)
    assert sum(n > limit for n in tokens.values()) > 1
    assert len(ids(data.val_dataloader())) == len(ids(data.test_dataloader())) == 5


def test_a_batch_too_small_for_an_utterance(make: Make) -> None:
    for key, settings in {"data.max_frames": {"max_frames": 150}, "train.batch.bucket": {"update_frames": 150}}.items():
        data = make(**settings)
        data.setup()
        with pytest.raises(ConfigError, match=rf"{key}=150: the longest utterance has 198 frames"):
            data.train_dataloader()


def test_masks_are_a_function_of_seed_epoch_and_utterance(make: Make) -> None:
    before = torch.get_rng_state()

    def features(epoch: int = 0, **settings: Any) -> dict[str, Tensor]:
        data = make(augment=SpecAugment(freq_mask=8, time_mask=60), **settings)
        attach(data, current_epoch=epoch)
        loader = data.train_dataloader()
        return {id: x[:n] for b in loader for id, x, n in zip(ids_of(b), b.features, b.feature_lengths, strict=True)}

    first, again, others = features(), features(update_frames=400, num_workers=1), features(epoch=1)
    assert sorted(first) == sorted(again) == sorted(others)
    assert all(torch.equal(first[id], again[id]) for id in first)  # batched otherwise, masked alike
    assert not all(torch.equal(first[id], others[id]) for id in first)
    fewer = features(min_input_frames=50)
    assert len(fewer) == 4
    assert all(torch.equal(first[id], fewer[id]) for id in fewer)  # a filter moves no other utterance's masks
    reseeded = features(seed=2)
    assert not all(torch.equal(first[id], reseeded[id]) for id in first)
    assert torch.equal(before, torch.get_rng_state())  # the global state is left alone


def test_ranks_share_training_but_scoring_outside_a_trainer_sees_everything(
    make: Make,
) -> None:
    def loaders(rank: int, testing: bool) -> tuple[list[str], list[str], list[str]]:
        data = make(max_sentences=1, update_frames=6000, bucket_frames=3000)
        attach(data, global_rank=rank, world_size=2, testing=testing)
        return ids(data.train_dataloader()), ids(data.val_dataloader()), ids(data.test_dataloader())

    (train_0, dev_0, test_0), (train_1, dev_1, _) = loaders(0, False), loaders(1, False)
    assert len(train_0) == len(train_1) == 3
    assert len({*train_0, *train_1}) == 5
    assert len(dev_0) + len(dev_1) == len({*dev_0, *dev_1}) == 5
    assert len(test_0) == 5
    assert sorted(loaders(0, True)[2] + loaders(1, True)[2]) == sorted(test_0)


def test_sample_corpus_is_said_loudly(make: Make, corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Sampled(MustC):
        def sample(self, cache_dir: Path) -> Path:
            return corpus

    data = make(root=None, reader=Sampled())
    data.setup()
    assert data.is_sample and data.corpus in caplog.text


def test_everything_is_checked_before_features_are_computed(make: Make, edit: Edit, tmp_path: Path) -> None:
    make().setup("test")  # only what is tested is computed
    assert [x.name.rpartition("-")[0] for x in (tmp_path / "cache/features").iterdir() if x.is_dir()] == ["tst-COMMON"]
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(DataError, match="leave nothing of the training split"):
        make(max_input_frames=3).setup()
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"task\.data\.vocab_size=500: .* 16"):
        make(vocab_size=500).setup()
    assert not (tmp_path / "cache" / "features").exists()
    shutil.rmtree(tmp_path / "cache")
    edit("tst-COMMON.yaml", "offset: 9.5", "offset: 995")
    with pytest.raises(DataError, match=r"tst-COMMON\.yaml line 2"):
        make().setup()
    assert not (tmp_path / "cache").exists()


def test_empty_text_is_left_out_if_asked(make: Make, edit: Edit) -> None:
    edit("train.de", "zwei eins\n", "\n")
    data = make(drop_empty=True, vocab_size=15)
    data.setup()
    assert sorted(ids(data.train_dataloader())) == ["ted_1_0", "ted_1_1", "ted_1_2", "ted_2_1"]
    assert data.report.plain()["train"] == {
        "read": 5,
        "used": 4,
        "unit": "segments",
        "left_out": {"empty text": {"count": 1, "example": "ted_2_0"}},
    }
