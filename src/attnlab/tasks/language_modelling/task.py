"""Language models, scored by perplexity."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from attnlab.config.build import instantiate
from attnlab.config.compose import PRETRAINED
from attnlab.config.rules import SAMPLE
from attnlab.conversion.base import target_of
from attnlab.conversion.healing import Teacher
from attnlab.conversion.layer_file import (
    CONVERSION,
    read_about,
    read_layers,
    remove_stored,
    replaced,
    with_layers,
    write_layers,
)
from attnlab.conversion.layers import converted_copy
from attnlab.conversion.original import check_inputs, load_original
from attnlab.conversion.texts import calibration_tokens, scale_tokens
from attnlab.data.inputs import InputKind
from attnlab.data.samples.markov import Source
from attnlab.data.text.vocabulary import PretrainedTokens, PretrainedVocabulary, Vocabulary, Words, read_vocabulary
from attnlab.decoding import Sampling
from attnlab.errors import ConfigError, DataError
from attnlab.models import Decoder, LanguageModel
from attnlab.models.build import build_model, cache_shape, count_parameters, identity, set_cache_bits, without_memory
from attnlab.models.token_loss import chunk_of
from attnlab.run.device import compiles, device_of, scoring_dtype
from attnlab.run.directory import ORIGINAL, PREDICTIONS, WINDOWS
from attnlab.run.files import write_text
from attnlab.run.record import NOT_RUN, first_process
from attnlab.tasks.base import Format, Predicts, TextTask, Transforms, file_of_run
from attnlab.tasks.prediction import Predictor, Result, changed
from attnlab.tasks.restored import Restored
from attnlab.training.compiled import COMPILED_STEPS, Compiled

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback

    from attnlab.data.text.language_modelling import LanguageModellingData
    from attnlab.tasks.language_modelling.module import LanguageModelling
    from attnlab.tasks.language_modelling.needle import Needle
    from attnlab.tasks.language_modelling.score import LanguageScore

log = logging.getLogger(__name__)

VOCABULARY = "vocabulary.json"  # in the run directory
CONFIGURE = "attnlab.tasks.complete"  # see attnlab.config.check
INPUT = InputKind("text", (), ("text", "prompt", "input"))
POINTS = ("original", "converted", "healed")  # the states of a converted model that are scored
SCORED = {"convert": "converted", "train": "healed"}  # the state that a mode scores at its end


class LanguageModellingTask(TextTask, Predicts, Transforms):
    """A decoder over text alone; the best checkpoint is the one with the lowest validation loss."""

    monitor = "val_loss"
    better: Literal["min", "max"] = "min"
    file_names = (VOCABULARY, CONVERSION)
    batch_key = "batch_size"
    input_kind = INPUT

    @property
    def workloads(self) -> tuple[str, ...]:
        of_model = ("generation", "prefill")
        if self.cfg.task.get("weights"):
            return (*of_model, "decoding", "training", "model", "kernels")
        return (*super().workloads, *of_model)

    def build(self) -> LanguageModel:
        if self.cfg.task.get("weights") is not None:
            model = self._model(self.cfg.task.data.vocab_size)
            target = target_of(self.cfg)
            assert isinstance(model, Decoder)
            if target is None:
                return model
            if self.cfg.checkpoint and (layers := self._layer_file()) is not None:
                return target.healing.freeze(self._with_layers(self.cfg.task.data.vocab_size, layers))
            model = replaced(model, target.planned_layers(model.attentions))
            set_cache_bits(self.cfg, model.attentions)
            return target.healing.freeze(model)
        data = self.cfg.task.data
        size: int = data.vocab_size
        sample = data.root is None and self.cfg.choices.scale == "sample"
        if sample and isinstance(instantiate(data.vocabulary, path="task.data.vocabulary"), Words):
            size = min(size, len(Source().words) + 1)  # the sample corpus has no more: its words and the end of a line
        return self._model(size)

    def _model(self, vocab_size: int) -> LanguageModel:
        model: LanguageModel = build_model(self.cfg, vocab_size=vocab_size)
        model.loss_chunk = chunk_of(self.cfg.hardware.loss_chunk, vocab_size)
        return model

    def sizes(self, record: dict[str, Any], model: Any) -> None:
        super().sizes(record, model)
        if (source := self.cfg.task.get("weights")) and not self.cfg.checkpoint:
            from attnlab.pretrained.huggingface import stored

            record |= stored(source)

    def describe(self, record: dict[str, Any]) -> None:
        """With `convert=` the original's sizes are `parameters.original` and `kv_cache.original`."""
        super().describe(record)
        if (target := target_of(self.cfg)) is not None:
            with without_memory():
                original = self._model(self.cfg.task.data.vocab_size)
            assert isinstance(original, Decoder)
            reason = next(filter(None, map(target.estimated, original.attentions)), None)
            if reason and not self.cfg.checkpoint:  # else its layers are read
                record["parameters"]["estimated"] = reason
                if target.measured:
                    record["kv_cache"]["estimated"] = "sizes and windows are measured"
            record["parameters"]["original"] = count_parameters(original)
            record["kv_cache"]["original"] = self.cache_sizes(original, cache_shape(self.cfg.bench))

    def rehearsal(self, model: nn.Module, size: int, device: torch.device) -> Callable[[], Tensor]:
        """A batch of `size` windows."""
        assert isinstance(model, LanguageModel)
        tokens = torch.zeros(size, self.cfg.task.data.window, dtype=torch.long, device=device)
        return lambda: model.loss(tokens, tokens).sum()

    def copies(self) -> int:
        """With a teacher while a converted model is trained."""
        return super().copies() + (target_of(self.cfg) is not None)

    def decoding_cache(self, model: LanguageModel, dtype: torch.dtype) -> int:
        """Of the continuations of the test text."""
        score, sampling = self.cfg.task.score, self.cfg.task.sampling
        rows, text = score.continuations, score.prompt_tokens + sampling.tokens
        return model.cache_bytes(rows, text, dtype=dtype)

    def monitors(self) -> dict[str, bool]:
        return {"val_loss": False}

    def check(self, directory: Path) -> None:
        smoothing = self.cfg.task.train.label_smoothing
        if smoothing and target_of(self.cfg) is not None:
            raise ConfigError(
                f"task.train.label_smoothing={smoothing:g}: with convert= training follows the original model and "
                "smooths no labels; leave it out"
            )
        with without_memory():
            model = self.build()
            self._check_lengths(model)
            if isinstance(model, Decoder) and (path := self._layer_file()) is not None:
                with_layers(model, path)
        instantiate(self.cfg.task.score, path="task.score")
        instantiate(self.cfg.task.sampling, path="task.sampling")
        if self.cfg.task.get("weights") is not None:
            check_inputs(self.cfg, target_of(self.cfg), model.max_length)

    def _check_lengths(self, model: LanguageModel) -> None:
        """Refuse a window, or a prompt with its continuation, that is longer than the model or its mechanism."""
        task, longest = self.cfg.task, model.longest
        limit = f"task.model.max_length={longest}"
        if longest < model.max_length:
            limit = f"the {longest} positions that its attention has"
        for name in ("window", "eval_window"):
            if (task.data[name] or 0) > longest:
                raise ConfigError(f"task.data.{name}={task.data[name]} is longer than {limit}")
        prompt, new = task.score.prompt_tokens, task.sampling.tokens
        if prompt + new > longest:
            raise ConfigError(
                f"task.score.prompt_tokens={prompt} and task.sampling.tokens={new} make {prompt + new} positions, more "
                f"than {limit}"
            )

    def prepare(self, record: dict[str, Any], stage: Literal["test"] | None) -> tuple[Any, Any]:
        """Lengths that a needle in a haystack cannot have are refused before the data is read."""
        data, needle = self.cfg.task.data, self._score().needle
        if self.cfg.choices.scale == PRETRAINED and first_process():
            log.info(
                "scale=%s, as model= implies: windows of %d tokens; scale=sample has those of 64 that earlier versions "
                "took",
                PRETRAINED,
                data.eval_window or data.window,
            )
        if needle is None or needle.lengths is None:
            return super().prepare(record, stage)
        words = isinstance(instantiate(self.cfg.task.data.vocabulary, path="task.data.vocabulary"), Words)
        with without_memory():
            needle.check(self.build().longest, "word" if words else "token")
        read, module = super().prepare(record, stage)
        for length in needle.ordered:  # that they fit is known once the tokens are
            list(needle.texts(length, read.vocabulary, read.tokens("validation")))
        return read, module

    def module(self, record: dict[str, Any], data: LanguageModellingData) -> LanguageModelling:
        layers = self._layer_file()
        if (target := target_of(self.cfg)) is not None:
            data.facts = target.healing.facts
        module: Any = self._module(data.vocabulary, layers)
        if self.cfg.resume and layers is not None and (about := read_about(layers)) is not None:
            record["conversion"] = about
        if self.cfg.resume and target_of(self.cfg) is not None:
            original = self._model(data.vocabulary.size)
            assert isinstance(original, Decoder)
            module.teacher = [Teacher(load_original(self.cfg, original, data), scale_tokens(data))]
        self.sizes(record, module.model)
        return module

    def _layer_file(self, weights: Path | None = None) -> Path | None:
        """The file that describes the converted layers of a run, by default of `checkpoint=` or `resume=`, if any."""
        run = self.cfg.checkpoint or self.cfg.resume
        if target_of(self.cfg) is None or not (weights or run):
            return None
        if weights is None:
            place = Path(run).expanduser()
            weights = place / "checkpoints" if place.is_dir() else place
        return file_of_run(weights, CONVERSION, "the layers of the converted model, which its run writes")

    def _with_layers(self, vocab_size: int, layers: Path | None) -> Any:
        """The model with random weights; `layers`: the file that describes the converted layers, if any."""
        model = self._model(vocab_size)
        if layers is not None:
            assert isinstance(model, Decoder)
            with_layers(model, layers)
            set_cache_bits(self.cfg, model.attentions)
        return model

    def _module(self, vocabulary: Vocabulary, layers: Path | None) -> LanguageModelling:
        from attnlab.tasks.language_modelling.module import Healed, LanguageModelling

        cfg, target = self.cfg, target_of(self.cfg)
        model = self._with_layers(vocabulary.size, layers)
        arguments = self.module_arguments() | {
            "identity": identity(cfg, vocabulary=vocabulary.fingerprint),
            "label_smoothing": cfg.task.train.label_smoothing,
        }
        if target is None:
            return LanguageModelling(model, vocabulary, **arguments)
        assert isinstance(model, Decoder)
        return Healed(model, vocabulary, healing=target.healing, **arguments)

    def before_fit(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """Load the pretrained weights, convert them, and score both: a conversion that is refused is refused first."""
        if self.cfg.task.get("weights") is None:
            return
        target = target_of(self.cfg)
        tokens, text = calibration_tokens(target.calibration, data) if target else (None, "")  # before the weights
        load_original(self.cfg, module.model, data)
        if target is None or tokens is None:
            return
        if not target.measured and first_process():  # what is measured depends on what was measured before
            log.info("%s", self._expected(tokens.numel(), data, module))
        model, layers, about, stored = converted_copy(self.cfg, target, module.model, tokens, text)
        original = self._point(record, directory, data, module)
        module.cpu()  # scoring left it on the device, with the weights that both share
        for name in (WINDOWS, PREDICTIONS) if original else ():
            (directory / name).replace(directory / f"{ORIGINAL}{name}")
        if self.cfg.mode != "convert":
            module.teacher = [Teacher(module.model, scale_tokens(data))]
        set_cache_bits(self.cfg, model.attentions)
        module.model = target.healing.freeze(model.train())
        self.sizes(record, model)
        about["points"] = dict.fromkeys(POINTS, NOT_RUN) | {"original": original}
        if self.cfg.mode != "convert":  # there it is what the run itself scores
            about["points"]["converted"] = self._point(record, directory, data, module)
        if first_process():
            write_layers(directory / CONVERSION, [layer.node for layer in layers], about, stored)
        record["conversion"] = about
        module.train()  # after scoring in eval mode; Lightning does not switch it back

    def _expected(self, converted: int, data: LanguageModellingData, module: LanguageModelling) -> str:
        """How long the conversion with `converted` tokens and the two scores are likely to take."""
        from attnlab.tasks.language_modelling.duration import expected

        assert isinstance(module.model, Decoder)
        strides = {None, self._score().sliding_stride}
        scored = sum(map(data.test_windows, strides)) * data.eval_window
        if (needle := self._needle(data, module)) is not None:
            scored += needle.trials * (1 + len({*needle.depths})) * sum(needle.ordered)
        return expected(module.model, converted, scored, data.eval_window, device_of(self.cfg))

    def transform(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """mode=convert: convert, and save the weights as a trained run does."""
        from attnlab.pretrained.weights import write_weights

        self.before_fit(record, directory, data, module)
        if first_process():
            place = directory / "checkpoints" / "averaged.safetensors"
            write_weights(place, module.model.state_dict(), module.identity)
        self.score(record, directory, data, module)

    def _point(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> dict[str, Any]:
        """Perplexity, cache and speed of decoding of the model as it is now, on rank zero."""
        sections = self.scored(self.scoring(directory, data, module), data, module)
        for section, values in (self._continued(directory, data, module) if sections else {}).items():
            sections[section] = sections.get(section, {}) | values
        return point(sections) if sections else {}

    def save_files(self, directory: Path, data: LanguageModellingData) -> None:
        data.vocabulary.save(directory / VOCABULARY)
        before = Path(self.cfg.resume or directory).expanduser() / CONVERSION
        if before.is_file() and not (directory / CONVERSION).exists():  # of the run that a new one continues
            write_text(directory / CONVERSION, before.read_text(encoding="utf-8"))

    def reuse_files(self, data: LanguageModellingData, files: Mapping[str, Path]) -> None:
        if VOCABULARY in files:
            data.run_vocabulary = read_vocabulary(files[VOCABULARY])

    def _restored(self, model: LanguageModel, vocabulary: Vocabulary) -> Restored:
        parts = {"compiled": Compiled(compiles(self.cfg)), "compiled_steps_part": COMPILED_STEPS}
        return Restored(model, identity(self.cfg, vocabulary=vocabulary.fingerprint), vocabulary=vocabulary, **parts)

    def restore(self) -> Any:
        """Without `checkpoint=` the pretrained decoder of `model=`."""
        if self.cfg.checkpoint is not None:
            return super().restore()
        device, data = device_of(self.cfg), self.cfg.task.data
        words: PretrainedTokens = instantiate(data.vocabulary, path="task.data.vocabulary")
        vocabulary = words.vocabulary(data.vocab_size)
        model = self._model(vocabulary.size)
        assert isinstance(model, Decoder)
        load_original(self.cfg, model, None)
        module = self._restored(model, vocabulary)
        self.round(module)
        return module.to(device).eval()

    def rebuilt(self, weights: Path) -> Restored:
        vocabulary = read_vocabulary(file_of_run(weights, VOCABULARY, "the vocabulary"))
        source = self.cfg.task.get("weights")
        if source not in (None, SAMPLE) and not isinstance(vocabulary, PretrainedVocabulary):
            log.warning(
                "%s: an earlier version left out the tokenizer's files: prompts begin with the mark between texts, "
                "no token ends a text, and an export has no chat template; convert or train %s again",
                weights,
                source,
            )
        return self._restored(self._with_layers(vocabulary.size, self._layer_file(weights)), vocabulary)

    def export(self, folder: Path, format: Format, record: Mapping[str, Any]) -> Callable[[], dict[str, Any]] | None:
        """The format "hf" is a Llama or a folder with modelling files, which transformers loads."""
        if format == "safetensors":
            return super().export(folder, format, record)
        from attnlab.export import language

        module = self.restore().cpu()
        path = self.saved_files().get(CONVERSION)
        layers = None if path is None else read_layers(path)
        return language.export(module.model, self.cfg, module.vocabulary, record, folder, layers, format)

    def files_beside(self, module: Any) -> Mapping[str, bytes]:
        return module.vocabulary.files if isinstance(module.vocabulary, PretrainedVocabulary) else {}

    def predictor(self, module: Any, **settings: Any) -> Continuation:
        return Continuation(module, self.cfg, **settings)

    def _score(self) -> LanguageScore:
        return instantiate(self.cfg.task.score, path="task.score")

    def scoring(self, directory: Path, data: LanguageModellingData, module: LanguageModelling) -> list[Callback]:
        return [self._score().quality(data, directory, alone=self.cfg.hardware.strategy == "fsdp")]

    def after_scoring(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """Continue some places of the test text, and ask for the needle in a haystack."""
        for section, values in self._continued(directory, data, module).items():
            record[section] |= values
        if "conversion" in record and self.cfg.mode in SCORED:
            points = record["conversion"]["points"]
            points[SCORED[self.cfg.mode]] = point(record)
            record["conversion"]["recall"] = {
                name: values["needle"]["accuracy"]
                for name, values in points.items()
                if isinstance(values, dict) and "needle" in values
            }
            from attnlab.tasks.language_modelling.score import ratio_to_original  # it imports lightning

            if (ratio := ratio_to_original(directory)) is not None:
                record["conversion"]["perplexity_ratio"] = ratio
            remove_stored(directory / CONVERSION, Path(self.cfg.cache_dir).expanduser())

    def _continued(self, directory: Path, data: Any, module: Any) -> dict[str, dict[str, Any]]:
        score, device, precision = self._score(), device_of(self.cfg), self.cfg.hardware.precision
        sampling: Sampling = instantiate(self.cfg.task.sampling, path="task.sampling")
        sections = score.continue_texts(module, data, sampling, device, precision, directory)
        if (needle := self._needle(data, module)) is not None:
            size, dtype, text = (
                data.eval_batch_size * data.eval_window,
                scoring_dtype(precision),
                data.tokens("validation"),
            )
            recall = needle.score(module.model, data.vocabulary, text, tokens=size, device=device, dtype=dtype)
            sections["quality"] = {"needle": recall}
        return sections

    def _needle(self, data: LanguageModellingData, module: LanguageModelling) -> Needle | None:
        """The needle that is asked for, if any."""
        needle = self._score().needle
        if needle is not None and target_of(self.cfg) is not None:
            needle = needle.of_conversion(data.eval_window, module.vocabulary, data.tokens("validation"))
        return None if needle is None or needle.lengths is None else needle


def point(record: Mapping[str, Any]) -> dict[str, Any]:
    """Perplexity, cache, speed and recall of one state of the model, from the sections of a record."""
    quality, cache = record["quality"], record["kv_cache"]
    return {
        **{name: quality[name] for name in ("perplexity", "perplexity_interval") if name in quality},
        **{f"cache_{name}": cache[name] for name in ("bits",) if name in cache},
        **{f"cache_{name}": cache[name] for name in ("bytes_per_token", "bytes_measured", "bytes_predicted")},
        "tokens_per_second": record["inference"]["tokens_per_second"],
        **{name: quality[name] for name in ("needle",) if name in quality},
    }


class Continuation(Predictor):
    """The continuation of a text as `prediction`. The word for unknown words is never chosen.

    Each is drawn with the seed of `task.sampling`, so other inputs do not change it. `settings` are fields of
    `task.sampling`, in place of the configured ones.
    """

    def __init__(self, module: Any, cfg: DictConfig, **settings: Any) -> None:
        super().__init__(module, cfg.hardware.precision)
        self.module = module
        self.sampling: Sampling = changed(
            instantiate(cfg.task.sampling, path="task.sampling"), settings, "task.sampling"
        )

    def read(self, value: Any) -> list[int]:
        words = self.module.vocabulary
        ids = words.begun(words.given(value) if isinstance(value, str) else torch.as_tensor(value).flatten().tolist())
        if wrong := self.too_long(ids):
            raise DataError(f"{str(value)[:40]!r}: {wrong}")
        return ids

    def too_long(self, ids: list[int]) -> str | None:
        """The error of a text that does not fit the model with its continuation, or None."""
        longest, new, unit = self.module.model.longest, self.sampling.tokens, self.module.vocabulary.unit
        if len(ids) + new <= longest:
            return None
        positions = f"{len(ids)} {unit}s and task.sampling.tokens={new} make {len(ids) + new} positions"
        return (
            f"{positions}, more than the model's context of {longest}; shorten the text or lower task.sampling.tokens"
        )

    def size(self, prepared: list[int]) -> int:
        return len(prepared)

    def predict(self, batch: list[list[int]]) -> list[Result]:
        return [{"prediction": self.module.vocabulary.continuation(self.continued(ids), ids)} for ids in batch]

    def continued(self, ids: list[int]) -> list[int]:
        """The new ids after those of a text, up to the first that ends it, of a pretrained model alone."""
        vocabulary = self.module.vocabulary
        tokens: list[int] = self.sampling(
            self.module.model,
            torch.tensor([ids], device=self.device),
            num_ids=vocabulary.num_ids,
            never=[] if vocabulary.unknown_id is None else [vocabulary.unknown_id],
            end=vocabulary.stops,
            dtype=self.dtype,
            compiled=self.module.compiled or None,
        )[0].tolist()
        return tokens
