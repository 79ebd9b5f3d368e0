"""Checks that type annotations cannot express: bounds of other libraries' arguments, and relations between keys."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from omegaconf import DictConfig, OmegaConf

from attnlab.config.model import TIMM, check_architecture, check_optimizer
from attnlab.config.schema import constant, definition
from attnlab.errors import ConfigError

METRICS = Path(__file__).parents[1] / "metrics"

_NotNegative = Annotated[float, Ge(0)]
_Probability = Annotated[float, Ge(0), Le(1)]
_Decay = Annotated[float, Ge(0), Lt(1)]
# Annotations of arguments of torch and timm, by key. They are checked beside what the library declares itself.
FOREIGN: dict[str, Any] = {
    "task.optimizer.lr": _NotNegative,
    "task.optimizer.eps": _NotNegative,
    "task.optimizer.betas": list[_Decay],
    "task.optimizer.weight_decay": _NotNegative,
    "task.schedule.sched": Literal[
        "cosine", "tanh", "step", "constant", "multistep", "plateau", "poly", "wsd", "rsqrt"
    ],
    "task.schedule.warmup_epochs": Annotated[int, Ge(0)],
    "task.schedule.warmup_lr": _NotNegative,
    "task.schedule.min_lr": _NotNegative,
    "callbacks.ema.decay": _Decay,
    "callbacks.early_stopping.patience": Annotated[int, Ge(1)],
    "callbacks.early_stopping.min_delta": _NotNegative,
    "callbacks.early_stopping.mode": Literal["min", "max"],
    "trainer.limit_train_batches": Annotated[int, Ge(1)] | Annotated[float, Gt(0), Le(1)] | None,
    "trainer.limit_val_batches": Annotated[int, Ge(0)] | _Probability | None,
    "trainer.overfit_batches": Annotated[int, Ge(0)] | _Probability,
    "trainer.num_sanity_val_steps": Annotated[int, Ge(-1)] | None,
    "trainer.deterministic": bool | Literal["warn"] | None,
    "trainer.profiler": Literal["simple", "advanced", "pytorch", "xla"] | dict | None,
}

# Arguments of Lightning's Trainer that other keys set, with these keys.
TRAINER = {
    "accelerator": "hardware.accelerator",
    "devices": "hardware.devices",
    "num_nodes": "hardware.num_nodes",
    "strategy": "hardware.strategy",
    "precision": "hardware.precision",
    "sync_batchnorm": "task.train.batch.split",
    "max_steps": "task.train.max_steps",
    "max_epochs": "task.train.max_epochs",
    "max_time": "task.train.max_minutes",
    "accumulate_grad_batches": "task.train.batch",
    "gradient_clip_val": "task.train.clip",
    "gradient_clip_algorithm": "task.train.clip",
    "val_check_interval": "task.train.validate_every",
    "check_val_every_n_epoch": "task.train.validate_every_epochs",
    "log_every_n_steps": "task.train.log_every",
    "logger": "logger",
    "callbacks": "callbacks",
    "default_root_dir": "hydra.run.dir",
    "enable_progress_bar": None,
    "enable_checkpointing": None,
    "enable_autolog_hparams": None,
    "fast_dev_run": "debug=fast",
    "limit_test_batches": None,  # a score of a part of the test set would pass for one of the whole
    "plugins": None,
    "model_registry": None,
    "use_distributed_sampler": None,
    "reload_dataloaders_every_n_epochs": None,
}
POLICY = r"(rand|augmix|originalr?|v0r?|3a)(-[a-z]+[\d.]*)*"  # of timm's augmentation
DIVISORS = {f"task.model.{part}.num_heads": "task.model.d_model" for part in ("encoder", "decoder")}


EXTRAS = {"tensorboard": "log", "wandb": "log", "mlflow": "mlflow"}  # the extra that has a logger's package
SPEECH = "attnlab.data.FilterBank"  # features of recordings, which espeak-ng speaks for the sample corpora


def _check_packages(cfg: DictConfig) -> None:
    """Refuse what needs an optional package that is not installed."""
    needs = [(f"logger={name}", name, f"'attnlab[{EXTRAS[name]}]'") for name in cfg.logger if name in EXTRAS]
    spoken = cfg.data_root is None and OmegaConf.select(cfg, "task.data.features._target_") == SPEECH
    if spoken and cfg.mode in ("train", "test"):
        sample = f"task={cfg.task.name}: its sample corpus"
        needs.append((sample, "espeakng_loader", "'attnlab[samples]', or give data_root=<the directory of a corpus>"))
    for what, package, install in needs:
        if not find_spec(package):
            raise ConfigError(f"{what} needs the package {package}: pip install {install}")


def check_trainer(cfg: DictConfig) -> None:
    """Refuse the arguments of Lightning's Trainer that other keys set."""
    for name in cfg.trainer:
        if name in TRAINER:
            instead = f"; give {TRAINER[name]}" if TRAINER[name] else ""
            raise ConfigError(f"trainer.{name}: attnlab sets it itself{instead}")


def check_relations(cfg: DictConfig) -> None:
    """Check the keys of a resolved configuration that depend on each other."""
    _check_packages(cfg)
    _check_callbacks(cfg)
    _check_names(cfg)
    _check_lengths(cfg)
    _check_hardware(cfg)
    _check_decoding(cfg)
    for key, of in DIVISORS.items():
        value, multiple = OmegaConf.select(cfg, key), OmegaConf.select(cfg, of)
        if isinstance(value, int) and isinstance(multiple, int) and multiple % value:
            raise ConfigError(f"{key}={value}: expected a divisor of {of}={multiple}")
    size, patch = OmegaConf.select(cfg, "task.data.image_size"), OmegaConf.select(cfg, "task.model.patch_size")
    if size is not None and patch is not None and size % patch:
        raise ConfigError(f"task.data.image_size={size}: expected a multiple of task.model.patch_size={patch}")


def _check_names(cfg: DictConfig) -> None:
    """Refuse names of metrics, augmentations, models and optimizers that there are not."""
    sources = [file.read_text(encoding="utf-8") for file in METRICS.glob("*.py")]
    metrics = sorted(name for source in sources for name in re.findall(r'^    name = "(\w+)"$', source, re.MULTILINE))
    for key in ("task.score", "task.train.validate_score"):
        name = OmegaConf.select(cfg, key)
        if isinstance(name, str) and name not in metrics:
            raise ConfigError(f"{key}={name}: expected one of {', '.join(metrics)}")
    policy = OmegaConf.select(cfg, "task.data.auto_augment")
    if policy is not None and not re.fullmatch(POLICY, policy):
        raise ConfigError(f"task.data.auto_augment={policy}: expected a policy of timm, such as rand-m9-mstd0.5-inc1")
    if OmegaConf.select(cfg, "task.model._target_") == TIMM:
        check_architecture("task.model.name", cfg.task.model.name)
    if (optimizer := OmegaConf.select(cfg, "task.optimizer.opt")) is not None:
        check_optimizer(optimizer)


def _check_lengths(cfg: DictConfig) -> None:
    """Refuse windows and continuations of a language model that is trained or scored, where they are too long."""

    def get(key: str) -> Any:
        return OmegaConf.select(cfg, key)

    window, longest = get("task.data.eval_window") or get("task.data.window"), get("task.model.max_length")
    if window is None or constant(f"attnlab.modes.{cfg.mode}.READS_CORPUS") is not True:
        return
    if (stride := get("task.score.sliding_stride")) is not None and stride > window:
        raise ConfigError(f"task.score.sliding_stride={stride} is more than the window of {window}")
    prompt, new = get("task.score.prompt_tokens"), get("task.sampling.tokens")
    if isinstance(longest, int) and cfg.task.get("weights") is None and prompt + new > longest:
        raise ConfigError(
            f"task.score.prompt_tokens={prompt} and task.sampling.tokens={new} make {prompt + new} positions, more "
            f"than task.model.max_length={longest}"
        )


def _check_callbacks(cfg: DictConfig) -> None:
    """Refuse a watched metric of unknown direction, and several averages of the weights."""
    targets = {name: str(node.get("_target_")) for name, node in cfg.callbacks.items()}
    for name, node in cfg.callbacks.items():
        if "monitor" in node and "mode" not in node and "EarlyStopping" in targets[name]:
            raise ConfigError(
                f"callbacks.{name}.monitor={node.monitor}: give which values are better too, "
                f"+callbacks.{name}.mode=min or max"
            )
    means = [name for name, target in targets.items() if "WeightAveraging" in target]
    if means[1:]:
        raise ConfigError(f"callbacks=[{','.join(means)}]: each averages the weights; choose one of them")
    if means and (cfg.task.get("ema_decay") or cfg.hardware.strategy == "fsdp"):
        why = (
            "the task averages itself; set task.ema_decay=0"
            if cfg.task.get("ema_decay")
            else "hardware=fsdp shards them"
        )
        raise ConfigError(f"callbacks={means[0]}: {why}")


def _check_hardware(cfg: DictConfig) -> None:
    """Refuse hardware that the task cannot use."""
    kind = definition(str(OmegaConf.select(cfg, "task.kind._target_")))
    if cfg.mode == "train" and cfg.hardware.strategy == "fsdp" and kind and constant(f"{kind[0]}.SHARDED") is False:
        raise ConfigError(f"hardware=fsdp is not supported for task={cfg.task.name}; take hardware=ddp")
    for key in ("compile", "gradient_checkpointing") if "train" not in cfg.task else ():
        if cfg.hardware[key]:
            raise ConfigError(f"hardware.{key}=true: task={cfg.task.name} trains nothing; leave it out")
    devices = cfg.hardware.devices
    if OmegaConf.is_list(devices) and len(set(devices)) < len(devices):
        raise ConfigError(f"hardware.devices={devices}: expected each device once")


def _check_decoding(cfg: DictConfig) -> None:
    """Refuse a search whose texts would all be empty, or shorter than they must be."""
    decode = cfg.task.get("decode")
    if decode is not None and not decode.get("max_len_a") and decode.get("min_len", 0) > decode.get("max_len_b", 0):
        raise ConfigError(
            f"task.decode.min_len={decode.min_len}: expected at most task.decode.max_len_b={decode.max_len_b}"
        )
    for key in ("task.decode", "task.train.validate_search"):
        node, limits = OmegaConf.select(cfg, key) or {}, ("max_len_a", "max_len_b")
        longest = [OmegaConf.select(cfg, f"task.decode.{n}") if node.get(n) is None else node[n] for n in limits]
        if longest == [0, 0]:
            raise ConfigError(
                f"{key}: max_len_a and max_len_b are 0, so that every decoded text would be empty; set "
                "max_len_b to the most tokens of a text"
            )
