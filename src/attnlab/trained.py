"""A trained model, loaded from its run directory or from an exported folder alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from attnlab.config.nodes import check_nodes, require
from attnlab.config.rules import GGUF
from attnlab.data.corpus import read_json
from attnlab.data.inputs import InputKind, Inputs, Item, items_of
from attnlab.data.text.vocabulary import warn_left_out
from attnlab.decoding import Sampling
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained import hub, huggingface
from attnlab.pretrained.weights import first_line, readable
from attnlab.run.record import mechanism_of
from attnlab.tasks.base import Predicts, Restores, task_of
from attnlab.tasks.prediction import Predictor, Result, changed


class Model(ABC):
    """A model with weights that predicts."""

    @property
    @abstractmethod
    def input_kind(self) -> InputKind:
        """The kind of the inputs."""

    @abstractmethod
    def predictor(self, **settings: Any) -> Predictor:
        """The predictor of new inputs; `settings` as for :meth:`predict`."""

    def predict(self, inputs: Any, **settings: Any) -> Any:
        """Compute the output of the model for new inputs.

        Args:
            inputs: one input, or several in a list or dataset. A dataset has inputs as below, tuples that begin with
                one, or rows (dicts) as `datasets` gives.

                - Speech: a file or folder, or (samples, rate) with samples (T,) or (channels, T).
                - Images: a file or folder, a PIL image, or a tensor (3, H, W) of uint8 or of floats in [0, 1].
                - Text: a str is a text; a Path is a .txt file with a text in each line or a .jsonl file with an object
                  in each. A language model also takes a tensor (T,) of ids.
            settings: of decoding, in place of the run's: `beam=1` and other arguments of BeamSearch, of a language
                model `tokens=20`, `temperature=0` and other arguments of Sampling, of images `top=3`.

        Returns:
            A dict for one input; a list of dicts for a folder, a file of lines or objects, and several inputs.
            `prediction` is the text (a translation, transcript, summary or continuation) or the most probable class.
            Understanding adds `intent`; images add `classes`, a list of {"class": name, "probability": p}, the most
            probable first. Keys of JSON objects and of rows stay.

        Raises:
            TypeError: there is no such setting, or the object is no input.
            ConfigError: a setting has a wrong value.
            DataError: an input is missing, empty or not of the kind that the model reads.
        """
        kind, one = self.input_kind, is_one(inputs)
        items: Iterable[Item]
        if one:
            items = items_of(inputs, kind)
            one = not isinstance(items, Inputs) or items.form == "one"
        elif not isinstance(inputs, Iterable) and not hasattr(inputs, "__getitem__"):
            expected = f"a str, Path, array, image or dict with the key {' or '.join(kind.keys)}, or several in a list"
            raise TypeError(f"predict() got {inputs!r:.40}, no {kind.name}; expected {expected}")
        else:
            values = inputs if isinstance(inputs, Iterable) else map(inputs.__getitem__, range(len(inputs)))
            items = (item for value in values for item in items_of(value, kind))
        rows = [item.fields | result for item, result in self.predictor(**settings).results(items)]
        return rows[0] if one else rows


class Trained(Model):
    """The model of a run, ready to compute. :func:`attnlab.load` makes it.

    Attributes:
        cfg: the configuration, whose `checkpoint` names the run directory or a file of weights in it.
        task: the object that wires its parts.
        module: has the `model` with its weights, in evaluation mode on the device of `hardware.accelerator`; of text
            also the `tokenizer` or the `vocabulary`, of images the `classes`.

    Raises:
        DataError: a file of the run is missing or damaged.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        try:
            self.task = task_of(cfg, Restores)
            self.module: Any = self.task.restore()
        except OmegaConfBaseException as error:
            raise ConfigError(f"{cfg.checkpoint}: its configuration lacks a key ({first_line(error)})") from error

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.module.model.parameters())
        mechanism = mechanism_of(self.cfg.choices)
        return f"Trained(task={self.cfg.task.name}, attention={mechanism}, parameters={count:,})"

    @property
    def input_kind(self) -> InputKind:
        return task_of(self.cfg, Predicts).input_kind

    def predictor(self, **settings: Any) -> Predictor:
        return task_of(self.cfg, Predicts).predictor(self.module, **settings)


class ExportedText(Model):
    """A language model of an exported folder. :func:`attnlab.load` makes it. No code of the folder is run.

    Attributes:
        model: of a class of transformers, in evaluation mode.
        tokenizer: that of the folder, or None.
        of_source: the tokenizer's files are those of a pretrained model.
        choice: settings of transformers' GenerationConfig, the same for every continuation: ids that end it, and those
            that are never chosen.

    Raises:
        ConfigError: the model has a class of its own, or transformers is not installed.
        DataError: a file cannot be read.
    """

    input_kind = InputKind("text", (), ("text", "prompt", "input"))

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        library, type_ = hub.transformers(), config.get("model_type")
        check_sizes(config, folder)
        names = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if type_ == "attnlab":
            from attnlab.export.modeling_attnlab import AttnlabConfig, AttnlabForCausalLM

            kind, settings = AttnlabForCausalLM, AttnlabConfig
        elif str(type_) not in names:
            raise ConfigError(
                f"{folder}: the model_type {type_!r} is no language model of transformers, and code that a folder "
                "brings (auto_map) is never run; give a folder that mode=export wrote"
            )
        else:
            kind, settings = getattr(library, names[type_]), library.CONFIG_MAPPING[type_]
        self.folder, self.tokenizer = folder, None
        self.of_source = config.get("eos_token_id") is not None  # own exports name no end of a text
        try:
            known = settings.from_dict(hub.read_config(folder, str(folder)))
        except Exception as error:  # of strict dataclasses or validators
            raise DataError(
                f"{folder / hub.CONFIG}: {type_} refuses it: {' '.join(str(error).split())[:200]}"
            ) from error
        ends, left_out = huggingface.generation(str(folder), config)
        self.choice: dict[str, Any] = {"eos_token_id": ends or None, "pad_token_id": ends[0] if ends else None}
        if not self.of_source:
            self.choice["suppress_tokens"] = left_out.pop("suppress_tokens", None)
        warn_left_out(left_out, "the settings of predict choose tokens")
        model = hub.read_model(kind, known, hub.folder(str(folder)), str(folder), dtype=None)
        self.model: Any = model.to("cuda" if torch.cuda.is_available() else "cpu")
        settings_file = folder / "tokenizer_config.json"
        if not settings_file.is_file():
            return
        if self.of_source and "auto_map" not in read_json(settings_file):  # the class that transformers chooses
            self.tokenizer = huggingface.tokenizer(str(folder))
        else:
            self.tokenizer = library.PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)

    def __repr__(self) -> str:
        return f"ExportedText({self.folder}, {type(self.model).__name__})"

    def predictor(self, **settings: Any) -> Predictor:
        return Generation(self.model, self.tokenizer, self.of_source, self.choice, **settings)


class Generation(Predictor):
    """The continuation of a text as `prediction`, by `generate` of transformers.

    Args:
        of_source: the tokenizer is that of a pretrained model, whose special tokens are no text.
        choice: as of :class:`ExportedText`.
        settings: fields of `Sampling`.
    """

    def __init__(self, model: Any, tokenizer: Any, of_source: bool, choice: Mapping[str, Any], **settings: Any) -> None:
        super().__init__(model, "32-true")
        self.model, self.tokenizer, self.of_source = model, tokenizer, of_source
        self.sampling = sampling = changed(Sampling(), settings, "predict")
        options: dict[str, Any] = {"do_sample": False}
        if sampling.temperature:
            options = {"do_sample": True, "temperature": sampling.temperature}
            options |= {"top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
        kind = hub.transformers().GenerationConfig
        model.generation_config = kind()  # `generate` takes what is None below from it, also if the folder has it
        self.config = kind(**choice, **options, max_new_tokens=sampling.tokens)

    def read(self, value: Any) -> list[int]:
        if isinstance(value, str) and self.tokenizer is None:
            raise DataError("the exported folder has no tokenizer; give a tensor of ids")
        try:
            read: Any = self.tokenizer(value).input_ids if isinstance(value, str) else torch.as_tensor(value).tolist()
        except Exception as error:  # tokenizers raises this class itself, for a word that it does not have
            raise DataError(f"{str(value)[:40]!r}: {error}") from error
        return list(read)

    def size(self, prepared: list[int]) -> int:
        return len(prepared)

    def predict(self, batch: list[list[int]]) -> list[Result]:
        return [{"prediction": self._continued(ids)} for ids in batch]

    def _continued(self, ids: list[int]) -> str | list[int]:
        prompt = torch.tensor([ids], device=self.device)
        mask = torch.ones_like(prompt)
        with torch.random.fork_rng():
            torch.manual_seed(self.sampling.seed)
            row = self.model.generate(prompt, attention_mask=mask, generation_config=self.config)[0]
        new: list[int] = row[len(ids) :].tolist()
        if self.tokenizer is None:
            return new
        if not self.of_source:
            return str(self.tokenizer.decode(new))
        whole, before = (self.tokenizer.decode(part, skip_special_tokens=True) for part in ([*ids, *new], ids))
        return str(whole[len(before) :])


class ExportedImages(Model):
    """An image classifier of an exported folder. :func:`attnlab.load` makes it.

    Attributes:
        model: of timm, in evaluation mode.
        classes: names in the order of the outputs.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from timm import create_model

        self.folder, self.classes = folder, config["label_names"]
        model = create_model(f"local-dir:{folder}", pretrained=True)
        self.model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")

    def __repr__(self) -> str:
        return f"ExportedImages({self.folder}, {len(self.classes)} classes)"

    @property
    def input_kind(self) -> InputKind:
        from attnlab.tasks.image_classification.task import INPUT

        return INPUT

    def predictor(self, **settings: Any) -> Predictor:
        from timm.data import create_transform, resolve_model_data_config

        from attnlab.tasks.image_classification.task import Classification

        transform: Any = create_transform(**resolve_model_data_config(self.model))
        return Classification(self.model, self.classes, transform, **settings)


def exported(folder: Path) -> ExportedText | ExportedImages:
    """The model of a folder that mode=export wrote, or of a GGUF file.

    ConfigError: the folder has no model of transformers or timm. DataError: a file is missing or damaged.
    """
    folder = hub.folder(str(folder)) if folder.suffix == GGUF else folder
    config = read_json(folder / "config.json")
    if isinstance(config, dict) and config.keys() & {"architecture", "architectures"}:
        with readable(folder, "exported model"):
            return (ExportedImages if "architecture" in config else ExportedText)(folder, config)
    raise ConfigError(f"{folder}: no model of transformers or timm; to use plain weights, load their run directory")


def check_sizes(config: Mapping[str, Any], folder: Path) -> None:
    """Check the sizes in a config of a language model and, as those of a run, the arguments of attnlab's classes.

    DataError: a value that cannot be. ConfigError: a class that attnlab does not have.
    """
    own, file = config.get("model_type") == "attnlab", folder / hub.CONFIG
    parts = {"model": [config.get("model")], "mechanisms": config.get("mechanisms")} if own else {}
    for key, values in parts.items():
        if not isinstance(values, list) or not values or not all(isinstance(x, dict) and "class" in x for x in values):
            raise DataError(f"{file}: {key}: expected a class and its arguments, got {values!r:.40}")
    nodes = [(key, as_node(part, folder)) for key, values in parts.items() for part in values or ()]
    try:
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
            if own or key in config:
                require(key, Annotated[int, Ge(1)], config.get(key))
        for key, node in nodes:
            check_nodes(node, "task.model" if key == "model" else "attention")
    except ConfigError as error:
        raise DataError(f"{file}: {str(error).removeprefix('task.')}") from error


def as_node(part: Any, folder: Path) -> Any:
    """A part of a config with `_target_` in place of `class`. ConfigError: a class that attnlab does not have."""
    from attnlab.export.modeling_attnlab import CLASSES

    if not isinstance(part, dict):
        return part
    values = {key: as_node(value, folder) for key, value in part.items() if key != "class"}
    if "class" not in part:
        return values
    name = part["class"]
    if not isinstance(name, str) or name not in CLASSES:
        raise ConfigError(f"{folder}: {name} is no class of attnlab; transformers loads this folder")
    return {"_target_": f"{CLASSES[name].__module__}.{name}"} | values


def is_one(value: Any) -> bool:
    """Whether a value is one input: a text, path, row, array, image, or recording with its rate."""
    if isinstance(value, tuple):
        return len(value) == 2 and isinstance(value[1], int | float)
    array = any(hasattr(value, name) for name in ("__array__", "__array_interface__"))
    return array or isinstance(value, str | bytes | Path | Mapping)
