"""Translation, recognition, understanding, summaries: what turns a sequence into text."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from attnlab.config.build import instantiate
from attnlab.data.corpus import Utterance, read_json, reading
from attnlab.data.report import noted
from attnlab.data.text.tokenizer import Tokenizer
from attnlab.errors import ConfigError, DataError
from attnlab.models import CrossDecoder, PrefixDecoder
from attnlab.models.build import build_model, identity, without_memory
from attnlab.models.sequence import SequenceModel
from attnlab.models.token_loss import at_least_float32, chunk_of
from attnlab.run import record as records
from attnlab.run.device import compiles, scoring_dtype
from attnlab.run.files import write_text
from attnlab.run.identity import corpus_content
from attnlab.tasks.base import Predicts, TextTask, file_of_run, show_data
from attnlab.tasks.restored import RestoredTranslator
from attnlab.training.compiled import Compiled

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback

    from attnlab.data.corpus import Reader
    from attnlab.data.inputs import InputKind
    from attnlab.data.sequence_to_text import SequenceToTextData
    from attnlab.decoding import BeamSearch
    from attnlab.metrics.text import TextMetric
    from attnlab.tasks.sequence_to_text.module import Model, SequenceToText
    from attnlab.tasks.sequence_to_text.predict import TextPredictor

log = logging.getLogger(__name__)

CONFIGURE = "attnlab.tasks.match_parameters"  # see attnlab.config.check
TOKENIZER, CTC_TOKENIZER, LIMITS = "tokenizer.model", "ctc_tokenizer.model", "limits.json"  # in the run directory
TIMES = 2  # the longest training target: tokens that may be written where task.decode.max_len_b is null


class SequenceToTextTask(TextTask, Predicts):
    """Encoder, decoder, beam search; scored by `task.score` (BLEU, WER, ROUGE, intents)."""

    encoder: tuple[Path, dict[str, Tensor]] | None = None  # what the encoder starts from
    file_names = (TOKENIZER, CTC_TOKENIZER, LIMITS)
    batch_key = "max_frames"

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        if cfg.task.train.monitor is not None:
            self.monitor = cfg.task.train.monitor
            self.better = "max" if self.monitors().get(self.monitor, True) else "min"

    def monitors(self) -> dict[str, bool]:
        metrics = {"val_loss": False, "val_accuracy": True, type(self).monitor: True}
        if self.cfg.task.train.validate_decode:
            metrics |= {f"val_{name}": higher for name, higher in self._validation_metric().logged.items()}
        return metrics

    def _metric(self, name: str) -> type[TextMetric]:
        from attnlab.metrics.text import text_metrics

        return text_metrics()[name]

    def _validation_metric(self) -> type[TextMetric]:
        return self._metric(self.cfg.task.train.validate_score or self.cfg.task.score.name)

    def _scorer(self, metric: type[TextMetric], size: int, references: Sequence[str] | None = None) -> TextMetric:
        """The metric of `size` texts. With the references of the test set, it has chosen its tokenizer."""
        reader: Reader = instantiate(self.cfg.task.data.reader, path="task.data.reader")
        score = self.cfg.task.score
        own = metric.name == score.name or score.tokenize in metric.tokenizers  # another one may score validations
        scorer = metric(size, tokenize=score.tokenize if own else None, language=reader.language)
        if references is not None:
            scorer.choose(references)
        return scorer

    def _search(self, longest: int | None) -> BeamSearch:
        """The search; `longest`: the pieces of the longest training target."""
        search: BeamSearch = instantiate(self.cfg.task.decode, path="task.decode")
        if search.max_len_b is not None:
            return search
        if longest is None:
            raise ConfigError(f"task.decode.max_len_b=null: the run has no {LIMITS}; give the largest number of tokens")
        return replace(search, max_len_b=TIMES * longest)

    def _validation_search(self, search: BeamSearch) -> BeamSearch:
        others = {name: value for name, value in self.cfg.task.train.validate_search.items() if value is not None}
        return replace(search, **others)

    @property
    def workloads(self) -> tuple[str, ...]:
        """Beam search is measured for decoders that read the encoder's output as a prefix of their self-attention."""
        with without_memory():
            prefixed = isinstance(self.build().decoder, PrefixDecoder)
        return ("training", "decoding", "beam", "model", "kernels") if prefixed else super().workloads

    def build(self) -> Model:
        data = self.cfg.task.data
        shared = data.ctc_vocab_size == "shared"
        return self._model(data.vocab_size, data.vocab_size if shared else data.ctc_vocab_size)

    def _model(self, vocab_size: int, ctc_vocab_size: int | None) -> Model:
        ctc = {"ctc_vocab_size": ctc_vocab_size} if ctc_vocab_size else {}
        model: Model = build_model(self.cfg, vocab_size=vocab_size, **ctc)
        model.loss_chunk = chunk_of(self.cfg.hardware.loss_chunk, vocab_size)
        return model

    def rehearsal(self, model: nn.Module, size: int, device: torch.device) -> Callable[[], Tensor]:
        """A batch of `size` frames or pieces: sentences of the longest length that training accepts.

        Targets are assumed to be as long as source texts; those of speech to have one piece in ten frames.
        """
        rows, length = self._rows(size)
        inputs = torch.full((rows, length), Tokenizer.eos, device=device)
        lengths, pieces = torch.full((rows,), length, device=device), length
        encoder = self.cfg.task.model.encoder
        if encoder.get("num_mels") is not None:
            layers = [encoder.mix_layers] if encoder.get("mix_layers") else []
            inputs = torch.zeros(rows, length, *layers, encoder.num_mels, device=device)
            pieces = length // 10 + 1
        pieces = min(self.cfg.task.data.max_target_tokens, pieces)
        tokens = torch.full((rows, pieces), Tokenizer.eos, device=device)
        weight, smoothing = self.cfg.task.train.ctc_weight, self.cfg.task.train.label_smoothing
        assert isinstance(model, SequenceModel)

        def loss() -> Tensor:
            out = model.token_losses(inputs, lengths, tokens, tokens, Tokenizer.pad, smoothing)
            head, total = getattr(model, "ctc", None), out.smoothed.sum()
            return total + at_least_float32(head(out.encoded)).log_softmax(-1).sum() if weight and head else total

        return loss

    def _rows(self, frames: int) -> tuple[int, int]:
        """The number of sentences of the longest length in a batch, and that length."""
        length = min(frames, self.cfg.task.data.max_input_frames)
        return max(1, frames // length), length

    def decoding_cache(self, model: Any, dtype: torch.dtype) -> int:
        """Of the longest sentences that training accepts, with the most text that the search may write."""
        decode = self.cfg.task.decode
        rows, length = self._rows(self.cfg.task.decode_max_frames)
        prefix = _prefix(model, length)
        most = TIMES * self.cfg.task.data.max_target_tokens if decode.max_len_b is None else decode.max_len_b
        text = int(decode.max_len_a * prefix) + most
        return self.decoder(model).cache_bytes(rows * decode.beam, text, prefix, rows, dtype=dtype)

    def decoder(self, model: Any) -> Any:
        return model.decoder

    def check(self, directory: Path) -> None:
        task = self.cfg.task
        if task.train.validate_score == "intent" and task.score.name != "intent":
            raise ConfigError(
                "task.train.validate_score=intent: only with task.score=intent do texts begin with a class"
            )
        self._validation_search(instantiate(task.decode, path="task.decode"))
        self._check_features()
        with without_memory():
            decoder = self.build().decoder
        weights = [name for a in decoder.attentions for name, _ in a.named_parameters()]
        if isinstance(decoder, CrossDecoder) and any("prefix" in name for name in weights):
            raise ConfigError(
                "task.attention_prefix=true: with task.model.decoder._target_=attnlab.models.CrossDecoder no prefix "
                "stands before the text, and its weights would never learn; set it to false"
            )
        if task.train.ctc_weight and task.data.ctc_vocab_size is None:
            raise ConfigError(
                f"task.train.ctc_weight={task.train.ctc_weight} needs CTC labels: set task.data.ctc_vocab_size"
            )
        if self.monitor not in self.monitors():
            adds = "" if task.train.validate_decode else "; task.train.validate_decode=N adds the scores of N sentences"
            raise ConfigError(f"task.train.monitor={self.monitor}: expected {' or '.join(self.monitors())}{adds}")
        if task.train.validate_decode and self.cfg.hardware.strategy == "fsdp":
            raise ConfigError(
                f"task.train.validate_decode={task.train.validate_decode}: with hardware=fsdp no process has the "
                "complete model to decode with; set it to null (with task.train.monitor=null), or take hardware=ddp"
            )
        if task.encoder_checkpoint:
            self.encoder = self._read_encoder(Path(task.encoder_checkpoint).expanduser())

    def _read_encoder(self, checkpoint: Path) -> tuple[Path, dict[str, Tensor]]:
        """The file of a run's weights, and those of its encoder.  DataError: they do not fit this run's encoder.

        The size of an embedding follows from the text and is checked later.
        """
        from attnlab.pretrained.weights import check, find_weights, read_checkpoint

        with without_memory():
            encoder: nn.Module = self.build().encoder
        try:
            path = find_weights(checkpoint)
            weights = read_checkpoint(path)[0]
            weights = {k.removeprefix("encoder."): v for k, v in weights.items() if k.startswith("encoder.")}
            if not hasattr(encoder, "embedding"):
                check(encoder, path, weights)
        except DataError as error:
            needs = "both runs need the same task.model.encoder and d_model"
            raise DataError(f"task.encoder_checkpoint: {error}; {needs}") from error
        return path, weights

    def statistics(self, record: dict[str, Any]) -> None:
        """Fill `corpus`, `statistics` and the identity of the run: texts and the headers of recordings are read."""
        data: SequenceToTextData = instantiate(self.cfg.task.data, path="task.data")
        record["statistics"] = data.statistics()
        record["corpus"] = data.corpus
        show_data(record, data.report)
        assert data.location is not None
        records.identify(record, corpus_content(data.location, Path(self.cfg.cache_dir)))

    def prepare(self, record: dict[str, Any], stage: Literal["test"] | None) -> tuple[Any, Any]:
        self._scorer(self._metric(self.cfg.task.score.name), 0)  # a missing tokenizer is an error before data is read
        if stage is None and self.cfg.task.train.validate_decode:
            self._scorer(self._validation_metric(), 0)
        return super().prepare(record, stage)

    def module(self, record: dict[str, Any], data: SequenceToTextData) -> SequenceToText:
        self.references = data.texts(data.reader.splits[2])
        scorer = self._scorer(self._metric(self.cfg.task.score.name), 0, self.references)
        if scorer.tokenize:
            log.info("texts are split by the tokenizer %s, chosen by %s", scorer.tokenize, scorer.about["tokenize_by"])
        for warning in scorer.about.get("warnings", ()):
            log.warning(warning)
        module = self._module(data.tokenizer, data.ctc_tokenizer, self._search(data.longest_target))
        self.sizes(record, module.model)
        record["inference"]["max_len_b"] = module.search.max_len_b
        self._note_unreachable(module, data)
        data.test_max_frames = self.cfg.task.decode_max_frames
        if self.cfg.task.train.validate_decode:
            self._decode_validation(module, data)
        return module

    def _decode_validation(self, module: Any, data: SequenceToTextData) -> None:
        """Choose the sentences that every validation decodes, evenly spread."""
        total = len(data.split(data.reader.splits[1]))
        number = min(self.cfg.task.train.validate_decode, total)
        chosen = [i * total // number for i in range(number)]
        scorer = self._scorer(self._validation_metric(), number, self.references)
        module.decode_validation(scorer, chosen, self._validation_search(module.search))

    def _note_unreachable(self, module: SequenceToText, data: SequenceToTextData) -> None:
        """Note the references that the decoder cannot write, whatever it has learned."""
        scorer = self._scorer(self._metric(self.cfg.task.score.name), 1, self.references)
        for name, examples in data.held_out.items():
            limits = module.search.limits(_prefix(module.model, torch.as_tensor(examples.inputs.lengths))).tolist()
            targets = [ids[:-1] for ids in examples.targets]
            texts = zip(examples.utterances, targets, limits, strict=True)
            long = [x.id for x, ids, limit in texts if len(ids) > limit]
            decoded = zip(examples.utterances, module.tokenizer.decode_all(targets), strict=True)
            other = [x.id for x, text in decoded if text != x.target and not _same(scorer, x, text)]
            with data.report.of(name):
                most = f"task.decode.max_len_b={module.search.max_len_b}"
                noted(f"reference longer than {most} allows", "".join(long[:1]), len(long))
                changed = "reference that the vocabulary cannot write as it is (task.data.normalisation, vocab_size)"
                noted(changed, "".join(other[:1]), len(other))

    def _module(self, tokenizer: Tokenizer, ctc: Tokenizer | None, search: BeamSearch) -> SequenceToText:
        from attnlab.tasks.sequence_to_text.module import DecodesValidation, SequenceToText

        cfg = self.cfg
        ctc = ctc if cfg.task.train.ctc_weight else None
        kind = DecodesValidation if cfg.task.train.validate_decode else SequenceToText
        return kind(
            self._model(tokenizer.size, None if ctc is None else ctc.size),
            tokenizer,
            search,
            cache_dtype=scoring_dtype(cfg.hardware.precision),
            classify=cfg.task.score.name == "intent",
            identity=self._identity(tokenizer, ctc),
            label_smoothing=cfg.task.train.label_smoothing,
            ctc_weight=cfg.task.train.ctc_weight,
            first_token_weight=cfg.task.train.first_token_weight,
            **self.module_arguments(),
        )

    def save_files(self, directory: Path, data: SequenceToTextData) -> None:
        data.tokenizer.save(directory / TOKENIZER)
        if data.ctc_tokenizer and self.cfg.task.train.ctc_weight:
            data.ctc_tokenizer.save(directory / CTC_TOKENIZER)
        write_text(directory / LIMITS, json.dumps({"longest_target": data.longest_target}) + "\n")

    def reuse_files(self, data: SequenceToTextData, files: Mapping[str, Path]) -> None:
        names = {"": TOKENIZER, "ctc_": CTC_TOKENIZER}
        data.run_vocabularies = {k: Tokenizer.load(files[name]) for k, name in names.items() if name in files}
        data.longest_target = _longest_target(files.get(LIMITS))

    def rebuilt(self, weights: Path) -> RestoredTranslator:
        cfg, ctc = self.cfg, None
        if cfg.task.train.ctc_weight:
            ctc = Tokenizer.load(file_of_run(weights, CTC_TOKENIZER, "the SentencePiece model of the CTC labels"))
        tokenizer = Tokenizer.load(file_of_run(weights, TOKENIZER, "the SentencePiece model"))
        follows = cfg.task.decode.max_len_b is None
        limits = file_of_run(weights, LIMITS, "the length of the longest training target") if follows else None
        return RestoredTranslator(
            self._model(tokenizer.size, None if ctc is None else ctc.size),
            self._identity(tokenizer, ctc),
            tokenizer=tokenizer,
            search=self._search(_longest_target(limits)),
            cache_dtype=scoring_dtype(cfg.hardware.precision),
            steps=Compiled(compiles(cfg)),
        )

    def _identity(self, tokenizer: Tokenizer, ctc: Tokenizer | None) -> dict[str, Any]:
        labels = None if ctc is None else ctc.fingerprint
        return identity(self.cfg, vocabulary=tokenizer.fingerprint, CTC_vocabulary=labels)

    @property
    def input_kind(self) -> InputKind:
        from attnlab.tasks.sequence_to_text.predict import input_kind

        return input_kind(self.cfg)

    def predictor(self, module: RestoredTranslator, **settings: Any) -> TextPredictor:
        from attnlab.tasks.sequence_to_text.predict import TextPredictor

        return TextPredictor(module, self.cfg, **settings)

    def _check_features(self) -> None:
        """Refuse an encoder whose features are not those of the front end."""
        encoder, node = self.cfg.task.model.encoder, "task.data.features"
        front = instantiate(self.cfg.task.data.features, path=node)
        for key, name in (("num_mels", "width"), ("mix_layers", "layers")):
            if (value := getattr(front, name, None)) != encoder.get(key):
                raise ConfigError(f"task.model.encoder.{key}={encoder.get(key)}, but {node} has {name}={value}")

    def before_fit(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """Start the encoder from another run's, as the recipe starts translation from recognition."""
        if self.encoder:
            from attnlab.pretrained.weights import fill

            path, weights = self.encoder
            fill(module.model.encoder, path, weights)
            log.info("encoder from %s", path)

    def protocol(self, module: SequenceToText) -> dict[str, Any]:
        dtype = str(module.cache_dtype or torch.float32).removeprefix("torch.")
        return {"beam": module.search.beam, "dtype": dtype}

    def scoring(self, directory: Path, data: SequenceToTextData, module: SequenceToText) -> list[Callback]:
        from attnlab.callbacks.cost import CacheBytes, Memory, ScoringSpeed
        from attnlab.callbacks.scoring import PredictionsFile, Quality

        size = len(data.split(data.reader.splits[2]))
        alone = ", on rank zero alone" if self.cfg.hardware.strategy == "fsdp" else ""
        speed = ScoringSpeed(
            f"encoder and search of {size} sentences{alone}; tokens of best hypotheses", **self.protocol(module)
        )
        scorer = self._scorer(self._metric(self.cfg.task.score.name), size, self.references)
        missing = data.report.splits[data.reader.splits[2]].missing
        about = {"sentences": size, **({"sentences_left_out": missing} if missing else {})}
        quality = Quality({"": scorer}, about)
        return [Memory(), speed, CacheBytes(), PredictionsFile(size, directory / "predictions.tsv"), quality]

    def after_scoring(self, record: dict[str, Any], directory: Path, data: Any, module: SequenceToText) -> None:
        """Record the encoder's share of each layer of the stored features, and the number of texts that may be cut."""
        if module.cut:
            record["quality"]["ended_at_limit"] = module.cut
            most = f"task.decode.max_len_b={module.search.max_len_b}"
            log.warning(
                "%d of %d texts ended at the limit of length, %s", module.cut, record["quality"]["sentences"], most
            )
        if (mix := getattr(module.model.encoder, "mix", None)) is not None:
            record["front_end"] = {"layer_shares": [round(share, 4) for share in mix.shares().tolist()]}


def _prefix(model: Any, length: Any) -> Any:
    """The length of the encoder's output for an input of `length`; also of several."""
    convolutions = getattr(getattr(model.encoder, "subsample", None), "convs", ())  # each halves the length
    return -(-length // 2 ** len(convolutions))


def _longest_target(path: Path | None) -> int | None:
    """The pieces of the longest training target of a run, from its LIMITS; None: an older run has no such file."""
    if path is None:
        return None
    with reading(path, "the longest_target of a run"):
        return int(read_json(path)["longest_target"])


def _same(scorer: TextMetric, reference: Utterance, text: str) -> bool:
    """Whether a metric of one text gives a text the score of the reference itself."""
    scores = []
    several = "0 0 0 0"  # words before both, because BLEU has no value for fewer than four
    for hypothesis in (reference.target, text):
        fields = {
            "hypotheses": f"{several} {hypothesis}",
            "references": f"{several} {reference.target}",
            "others": (),
            **dict.fromkeys(("labels", "free", "constrained"), reference.label),
        }
        scorer.reset()
        scorer.update([0], **{name: [fields[name]] for name in scorer.fields})
        scores.append(scorer.compute())
    return bool(scores[0] == scores[1])


class SpokenIntentTask(SequenceToTextTask):
    """Checkpoints are chosen by how often the first token, the class, is right."""

    monitor = "val_intent_accuracy"
