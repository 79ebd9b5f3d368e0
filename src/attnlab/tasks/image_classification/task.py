"""The task image classification: score a pretrained vision transformer, compress it, fine-tune it, score it again."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning and timm)

import torch
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig
from PIL import Image
from timm.data import Mixup
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torchvision.transforms.functional import to_pil_image

from attnlab.callbacks.cost import Memory, ScoringSpeed
from attnlab.callbacks.scoring import PredictionsFile, Quality
from attnlab.compression import Method, folder
from attnlab.compression.calibration import Grams, calibrated
from attnlab.compression.counting import multiply_adds, parameters, ratios
from attnlab.compression.folder import COMPRESSED
from attnlab.config.bounds import Size
from attnlab.config.build import instantiate
from attnlab.data.corpus import IMAGES, read_json
from attnlab.data.images.folder import ImageData
from attnlab.data.images.reading import check_image, read_rgb, rgb
from attnlab.data.inputs import InputKind
from attnlab.data.samples.images import CLASSES
from attnlab.errors import ConfigError, DataError
from attnlab.metrics.numbers import TopAccuracy
from attnlab.models.build import count_parameters
from attnlab.models.token_loss import at_least_float32
from attnlab.pretrained.timm import IMAGES as PREPARED
from attnlab.pretrained.timm import Timm, VisionTransformer
from attnlab.run.console import each
from attnlab.run.device import device_of, scoring_dtype
from attnlab.run.directory import DENSE, UNTUNED
from attnlab.run.files import write_text
from attnlab.run.identity import architecture
from attnlab.run.record import first_process
from attnlab.tasks.base import Compresses, Format, Predicts, file_of_run
from attnlab.tasks.image_classification.module import ImageClassification, head_alone
from attnlab.tasks.image_classification.pretraining import pretrain
from attnlab.tasks.prediction import Predictor, Result, changed

log = logging.getLogger(__name__)

SHARDED = False  # hardware=fsdp is refused
CONFIGURE = "attnlab.tasks.complete_images"  # see attnlab.config.check
CLASSES_FILE = "classes.json"  # in the run directory: the names of the classes, in the order of the logits


INPUT = InputKind("image", IMAGES, ("image", "path", "input"), check_image)


class ImageClassificationTask(Predicts, Compresses):
    """Compresses and fine-tunes a vision transformer on a folder of images.

    `record["compression"]` has top-1 and top-5 at three points, ranks and errors of each layer, and remaining shares.
    """

    points = ("dense", "compressed", "finetuned")
    file_names = (CLASSES_FILE,)
    batch_key = "batch_size"
    workloads = ("forward",)
    input_kind = INPUT

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        self.spec: VisionTransformer = instantiate(cfg.task.model, path="task.model")
        self.image_shape = (3, cfg.task.data.image_size, cfg.task.data.image_size)
        if self.method and self.method.calibration not in (None, "validation"):
            raise ConfigError(
                f"compress.calibration={self.method.calibration}: task=imagenet takes validation (a sample of the "
                "training images: its validation images are the test set) or null"
            )

    def build(self) -> nn.Module:
        """The dense model."""
        known = self.spec.num_classes is not None or self.cfg.data_root is not None or self.cfg.scale != "sample"
        model = self.spec.create(None if known else len(CLASSES))
        if self.cfg.task.trained == "head":
            head_alone(model)
        return model

    def describe(self, record: dict[str, Any]) -> None:
        """Fill `record` with the three ratios of IrrAtt's table 1, the parameters and the multiply-adds."""
        dense, model = self.outlined(self.method)
        record["compression"] = {"remaining": ratios(dense, model, self.image_shape)}
        self.sizes(record, model)
        if self.method:
            record["parameters"]["original"] = parameters(dense)

    def check(self, directory: Path) -> None:
        """Raise ConfigError for a strategy, a schedule, weights or ranks that cannot work, before the data is read."""
        instantiate(self.cfg.task.schedule, path="task.schedule")
        if self.spec.weights is None and self.cfg.task.pretrain.epochs < 1:
            raise ConfigError(
                "model: there are no pretrained weights to compress; give a file, a run or a name of timm's hub, or "
                "task.pretrain.epochs to train from scratch first"
            )
        if not self._compressed_folder():
            self.outlined(self.method)

    def rehearsal(self, model: nn.Module, size: int, device: torch.device) -> Callable[[], Tensor]:
        """A batch of `size` images, through the dense model."""
        images = torch.zeros(size, *self.image_shape, device=device)
        if self.cfg.task.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)

        def loss() -> Tensor:
            logits = at_least_float32(model(images))
            return F.cross_entropy(logits, torch.full_like(logits, 1 / logits.shape[-1]), reduction="sum")

        return loss

    def optimizer_of(self, model: nn.Module) -> Optimizer:
        """By timm, which leaves biases and norms undecayed."""
        return instantiate(self.cfg.task.optimizer, path="task.optimizer")(model)

    def copies(self) -> int:
        """With averaged weights."""
        return super().copies() + bool(self.cfg.task.ema_decay)

    def sizes(self, record: dict[str, Any], model: Any) -> None:
        record["parameters"] = parameters(model)
        if self.cfg.task.trained == "head":
            record["parameters"]["trainable"] = count_parameters(model.get_classifier())["total"]
        record["multiply_adds_per_image"] = multiply_adds(model, self.image_shape)

    def module(self, record: dict[str, Any], data: ImageData) -> ImageClassification:
        module = self._module(data.classes)
        self.sizes(record, module.model)
        data.paired = module.mixup is not None
        return module

    def _module(self, classes: list[str]) -> ImageClassification:
        cfg, task = self.cfg, self.cfg.task
        model = self._model_of_run() or self.spec.create(len(classes))
        if task.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        mixing = task.mixup
        mixup = None
        if mixing.mixup_alpha or mixing.cutmix_alpha:
            mixup = Mixup(**mixing, label_smoothing=task.label_smoothing, num_classes=len(classes))
        return ImageClassification(
            model,
            classes,
            identity={
                "compression": architecture(cfg)["compression"],
                "classes": hashlib.sha256("\n".join(classes).encode()).hexdigest()[:16],
                "model": {"name": self.spec.name, **self.spec.options(len(classes))},
            },
            label_smoothing=task.label_smoothing,
            mixup=mixup,
            ema_decay=task.ema_decay,
            ema_warmup=task.ema_warmup,
            trained=task.trained,
            fusion_penalty=cfg.compress.get("fusion_penalty", 0.0),
            channels_last=task.channels_last,
            **self.module_arguments(),
        )

    def save_files(self, directory: Path, data: ImageData) -> None:
        write_text(directory / CLASSES_FILE, json.dumps(data.classes, ensure_ascii=False) + "\n")

    def rebuilt(self, weights: Path) -> ImageClassification:
        return self._module(read_classes(file_of_run(weights, CLASSES_FILE, "the names of the classes")))

    def predictor(self, module: ImageClassification, **settings: Any) -> Classification:
        data: ImageData = instantiate(self.cfg.task.data, path="task.data")
        usual = data.transform(), data.eval_batch_size, self.cfg.hardware.precision
        return Classification(module, module.classes, *usual, **settings)

    def export(self, folder: Path, format: Format, record: Mapping[str, Any]) -> None:
        """A folder of timm in either format: plain weights, a config, and the names of the classes."""
        from attnlab.export import images

        if format in ("vllm", "deepseek"):
            raise ConfigError(f"format={format} is for language models")
        module = self.restore()
        classes = read_classes(self.saved_files()[CLASSES_FILE])
        images.export(module.model, self.spec, classes, self.cfg, record, folder)

    def _model_of_run(self) -> nn.Module | None:
        """The compressed model of the run that is used or resumed, if any."""
        source = self.cfg.checkpoint or self.cfg.resume
        run = Path(source).expanduser() if source else None
        for parent in [run, *run.parents] if run else []:
            if folder.is_folder(parent / COMPRESSED):
                return folder.load(parent / COMPRESSED).train()
        return None

    def read_weights(self) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
        """The weights of `checkpoint=`; of an untrained run (mode=compress), those of its compressed folder."""
        run = Path(self.cfg.checkpoint).expanduser()
        place = run / COMPRESSED
        if (run / "checkpoints").exists() or not folder.is_folder(place):
            return super().read_weights()
        log.info("%s: the run has no checkpoints; scoring its compressed model", place)
        identity = folder.read_manifest(place).get("notes", {}).get("identity", {})
        return place, dict(folder.load(place).state_dict()), identity

    def _compressed_folder(self) -> Path | None:
        """The folder of a compressed model, if `model=` names one or its run."""
        return folder.find(self.spec.weights) if self.spec.weights else None

    def before_fit(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """Load or pretrain the weights, compress the model and score it; in mode=test the weights are read only."""
        start = self._load(record, directory, data, module)
        if self.cfg.mode == "test":  # the model is scored as it is
            self.sizes(record, module.model)
            return
        about = self.compress(record, directory, data, module, start=start)
        if self.method and self.cfg.mode != "compress":
            self.measure("compressed", about, directory, data, module)

    def transform(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        self.before_fit(record, directory, data, module)
        super().score(record, directory, data, module)

    def _load(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> dict[str, Any] | None:
        """Give the module its dense model.  Returns the compression of the run of `model=`, if it names one."""
        if source := self._compressed_folder():
            module.model = folder.load(source).train()
            log.info("compressed model from %s", source)
            return folder.read_manifest(source).get("notes", {}).get("identity", {}).get("compression")
        if self.spec.weights:
            about, images = Timm().load(module.model, self.spec.weights), self.cfg.task.data
            shown = ", ".join(f"{key}={images[key]}" for key in ("image_size", "crop_pct", *PREPARED))
            log.info("model=%s: a %s, images prepared with %s", self.spec.weights, self.spec.name, shown)
            if about:
                record["weights"] = about
            if "head" in about and self.cfg.mode == "test":
                raise DataError(
                    f"model={self.spec.weights}: no classifier, so that it cannot be scored; train one first"
                )
        else:
            pretrain(self.cfg, record, directory, data, module)
        return None

    def measure(self, point: str, about: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        file = directory / {"dense": DENSE, "compressed": UNTUNED}[point]
        sections = self.scored([*self._meters(data), PredictionsFile(len(data.sets["val"]), file)], data, module)
        if sections:
            about["quality"][point] = sections["quality"]
            log.info("top-1 %(top1).2f %%, top-5 %(top5).2f %% of %(images)d images", sections["quality"])

    def calibrate(self, about: dict[str, Any], data: Any, module: Any) -> Method:
        assert self.method is not None
        device = device_of(self.cfg)
        model = module.model.to(device)

        def feed(grams: Grams) -> None:
            for images, *_ in each("calibrating the compression", data.calibration_dataloader()):
                model(images.to(device))

        return calibrated(self.method, model, feed)

    def remaining(self, dense: nn.Module, model: nn.Module) -> dict[str, Any]:
        return {"remaining": ratios(dense, model.cpu(), self.image_shape)}

    def score(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """Save the compressed folder with the final weights, score them, and fill `record`."""
        module.forget_average()
        if self.method and "compression" in record:
            self.save_compressed(directory, data, module)
        super().score(record, directory, data, module)

    def save_compressed(self, directory: Path, data: ImageData, module: ImageClassification) -> None:
        if not first_process():
            return
        notes = {"compress": self.cfg.choices.compress, "classes": data.classes, "identity": module.identity}
        options = self.spec.options(len(data.classes))
        folder.save(module.model, directory / COMPRESSED, self.spec.name, options, notes)

    def scoring(self, directory: Path, data: ImageData, module: ImageClassification) -> list[Callback]:
        return [*self._meters(data), PredictionsFile(len(data.sets["val"]), directory / "predictions.tsv")]

    def _meters(self, data: ImageData) -> list[Callback]:
        """Top-1 and top-5 in percent, speed and memory."""
        size = len(data.sets["val"])
        low = scoring_dtype(self.cfg.hardware.precision)
        speed = ScoringSpeed(f"forward passes over {size} images", "images", dtype="bfloat16" if low else "float32")
        return [Memory(), speed, Quality({"": TopAccuracy(size, len(data.classes))})]

    def after_scoring(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        if "compression" in record:
            point = "compressed" if self.cfg.mode == "compress" else "finetuned"
            record["compression"]["quality"][point] = record["quality"]
            if self.method:
                self.changed(record, directory)


def read_classes(path: Path) -> list[str]:
    """The names of the classes in a file of a run. DataError: it is damaged."""
    names = read_json(path)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path}: expected a list of the names of the classes")
    return names


@dataclass(frozen=True)
class Choices:
    """The number `top` of classes that a prediction names."""

    top: Size = 5


class Classification(Predictor):
    """The most probable class as `prediction`, and as `classes` the `top` ones with their probabilities.

    Args:
        names: of the classes, in the order of the logits.
        transform: from a PIL image in RGB to (3, H, W).
        settings: fields of `Choices`.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        transform: Callable[[Any], Tensor],
        limit: int = 32,
        precision: str = "32-true",
        **settings: Any,
    ) -> None:
        super().__init__(module, precision)
        self.module, self.names, self.transform, self.limit = module, names, transform, limit
        self.top = min(changed(Choices(), settings, "predict").top, len(names))

    def read(self, value: Any) -> Tensor:
        value = value[0] if isinstance(value, tuple) else value  # an item of a dataset: (image, label)
        if isinstance(value, str | Path):
            return self.transform(read_rgb(value))
        try:
            picture = value if isinstance(value, Image.Image) else to_pil_image(value)
        except (TypeError, ValueError) as error:
            raise DataError(f"not an image: {error}; expected a PIL image or a tensor (3, H, W)") from error
        return self.transform(rgb(picture))

    def size(self, prepared: Tensor) -> int:
        return 1

    def predict(self, batch: list[Tensor]) -> list[Result]:
        scores = self.module(torch.stack(batch).to(self.device)).float().softmax(-1)
        best = (part[:, : self.top].tolist() for part in scores.sort(dim=-1, descending=True, stable=True))
        results = []
        for values, places in zip(*best, strict=True):
            classes = [{"class": self.names[i], "probability": p} for p, i in zip(values, places, strict=True)]
            results.append({"prediction": classes[0]["class"], "classes": classes})
        return results

    def shown(self, result: Result) -> str:
        return "\t".join(f"{choice['class']} {choice['probability']:.3f}" for choice in result["classes"])
