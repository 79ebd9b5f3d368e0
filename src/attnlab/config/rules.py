"""Checks that type annotations cannot express: of modes, tasks and pretrained models, and relations between keys.

Nothing here imports torch, timm or transformers, or asks the Hugging Face hub.
"""

import re
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from attnlab.config import build as config
from attnlab.config.compose import PRETRAINED, Composer
from attnlab.config.schema import constant, definition
from attnlab.config.settings import MODES
from attnlab.errors import ConfigError, nearest

METRICS = Path(__file__).parents[1] / "metrics"
SAMPLE = "sample"  # in place of a decoder's folder or name: a small model, trained on the task's own text
GGUF = ".gguf"  # the suffix of a language model in one file
TIMM = "attnlab.pretrained.timm.VisionTransformer"  # the `_target_` whose weights are files, runs or names of timm
OF_THE_MODEL = ("attention", "task.model", "task.data.vocab_size", "task.data.vocabulary")  # nodes that it decides
FILES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")  # endings of weight files
READ_BY = {  # root keys that only some modes read
    "checkpoint": ("test", "predict", "generate", "evaluate", "describe", "export"),
    "prompt": ("generate",),
    "format": ("export",),
    "dtype": ("export",),
    "input": ("predict",),
    "output": ("predict", "describe", "export"),
    "resume": ("train",),
    "baseline": ("train", "test", "compress"),
}
NEED_WEIGHTS = ("test", "predict", "generate", "evaluate")
# What a directory has that `checkpoint=` may name: a run's, a compressed model's, one of transformers.
USABLE = ("config.yaml", "record.json", "checkpoints", "compressed", "manifest.json", "config.json")
TRAINER = {  # arguments of Lightning's Trainer that attnlab sets, and what says their value
    "by the keys of hardware": ("accelerator", "devices", "num_nodes", "strategy", "precision"),
    "by the keys of task.train": (
        *("max_steps", "max_epochs", "max_time", "accumulate_grad_batches", "gradient_clip_val", "sync_batchnorm"),
        *("gradient_clip_algorithm", "val_check_interval", "check_val_every_n_epoch", "log_every_n_steps"),
    ),
    "by logger=, callbacks=, debug= and hydra.run.dir=": ("logger", "callbacks", "fast_dev_run", "default_root_dir"),
    "itself: a bar is drawn on a terminal only, so | cat turns it off": ("enable_progress_bar",),
    "itself": (  # a score of a part of the test set would pass for one of all of it
        *("enable_checkpointing", "enable_autolog_hparams", "limit_test_batches", "plugins"),
        *("model_registry", "use_distributed_sampler", "reload_dataloaders_every_n_epochs"),
    ),
}
ROUNDS = ("test", "predict", "generate", "bench")  # the modes that read hardware.weights
DIVISORS = {f"task.model.{part}.num_heads": "task.model.d_model" for part in ("encoder", "decoder")}


# --- a composed configuration ------------------------------------------------------------------------------------


def check_composed(cfg: DictConfig, composer: Composer) -> None:
    """Check the mode, the task's groups and the knobs of a composed configuration."""
    check_mode(cfg, cfg.hydra.runtime.choices.task)
    _check_task(cfg, composer)
    if cfg.mode == "bench":
        references = [str(name).partition(".")[0] for name in cfg.bench.references or ()]
        names = [re.sub("^(published|compiled|int8)_", "", name) for name in references]
        for text in map(str, cfg.bench.overrides or ()):
            if "=" not in text or text.partition(".")[0] not in names:
                raise ConfigError(f"bench.overrides: {text}: expected REFERENCE.KEY=VALUE, of one in bench.references")
    for knob in config.KNOBS:
        if cfg[knob] is not None and not config.knob_paths(cfg, knob):
            _refuse_knob(cfg, knob, composer)


def check_mode(cfg: DictConfig, task: str) -> None:
    """Check that the mode exists, that the option `task` has it, and that it reads the root keys that are set."""
    if cfg.mode not in MODES:
        raise ConfigError(f"mode={cfg.mode}: no such mode{nearest(str(cfg.mode), MODES)}")
    if cfg.mode not in cfg.task.modes and not _of_every_task(cfg.mode):
        modes = dict.fromkeys([*cfg.task.modes, *filter(_of_every_task, MODES)])
        of = f"; checkpoint={cfg.checkpoint} is no run, whose task would count: give task=" if cfg.checkpoint else ""
        raise ConfigError(f"mode={cfg.mode}: task={task} has no such mode; it has {', '.join(modes)}{of}")
    for key, readers in READ_BY.items():
        if cfg[key] is not None and cfg.mode not in readers:
            raise ConfigError(f"{key}= is read by mode={' and mode='.join(readers)}, not by mode={cfg.mode}")
    weights = cfg.hardware.weights
    if weights != "float32" and (cfg.mode not in ROUNDS or "LanguageModelling" not in cfg.task.kind._target_):
        raise ConfigError(
            f"hardware.weights={weights}: expected mode={', '.join(ROUNDS)} of a language model, not "
            f"mode={cfg.mode} of task={task}; leave it out"
        )
    _check_export(cfg)
    for key in ("checkpoint", "resume", "baseline"):
        if cfg[key] is not None and not config.absolute(key, cfg[key]).exists():
            raise ConfigError(f"{key}={cfg[key]}: no such file or directory")
    if config.absolute("cache_dir", cfg.cache_dir).is_file():
        raise ConfigError(f"cache_dir={cfg.cache_dir}: a file; expected a directory, which is made if it is missing")
    if cfg.mode == "predict" and cfg.input is None:
        raise ConfigError("mode=predict needs input=<a text, a file or a folder>")
    if cfg.data_root is not None and "root" not in cfg.task.data:
        raise ConfigError(f"data_root={cfg.data_root}: task={task} reads no corpus; remove it, or unset DATA_ROOT")
    if cfg.checkpoint is not None:
        _check_checkpoint(cfg)
    elif cfg.mode in (*NEED_WEIGHTS, "export"):
        _check_weights(cfg)


def _check_export(cfg: DictConfig) -> None:
    """Check the keys that only some exports read."""
    if cfg.dtype is not None and (
        cfg.format == "safetensors"
        or "LanguageModelling" not in cfg.task.kind._target_
        and cfg.task.modes[0] != "compress"
    ):
        raise ConfigError(
            f"dtype={cfg.dtype} is read by mode=export of a language model, with format=hf or format=vllm; leave it out"
        )
    if cfg.prove.requests and cfg.prove.python is None:
        raise ConfigError("prove.requests= needs prove.python=<the Python of an environment with vLLM>")
    if cfg.prove.python is not None and (cfg.mode != "export" or cfg.format not in ("vllm", "deepseek")):
        raise ConfigError(
            f"prove.python= is read by mode=export format=vllm, not by mode={cfg.mode} format={cfg.format}"
        )


def _of_every_task(mode: str) -> bool:
    return constant(f"attnlab.modes.{mode}.EVERY_TASK") is True


def _check_checkpoint(cfg: DictConfig) -> None:
    if cfg.task.modes[0] == "compress" and cfg.model is not None:
        raise ConfigError(f"checkpoint={cfg.checkpoint} and model={cfg.model}: give one of them")
    path = Path(cfg.checkpoint).expanduser()
    if not path.is_dir():
        check_weights("checkpoint", str(path))
    elif not any((path / name).exists() for name in (USABLE[:-1] if cfg.mode == "export" else USABLE)):
        raise ConfigError(f"checkpoint={path}: not the directory of a run: there is no config.yaml")


def _check_weights(cfg: DictConfig) -> None:
    """Refuse a mode without the weights that it needs."""
    untrained = cfg.task.modes[0] == "compress"  # such a task trains nothing: model= names what it has
    pretrained = cfg.task.get("weights") is not None  # a decoder, which can be used as it is
    if cfg.mode == "export" and (cfg.model is None or pretrained):
        raise ConfigError("mode=export needs checkpoint=<a trained run>, or model=<a run of mode=compress>")
    if cfg.mode == "export":
        return
    choices = cfg.hydra.runtime.choices
    pretrained_images = OmegaConf.select(cfg, "task.model._target_") == TIMM and cfg.task.model.weights is not None
    if cfg.mode == "test" and pretrained_images and choices.compress == "none":
        return  # it is scored as it is
    if not ((untrained or pretrained) and cfg.model is not None):
        also = ", or model=<a run, a folder or a name of the hub>" * untrained
        raise ConfigError(f"mode={cfg.mode} needs checkpoint=<a run directory or a checkpoint file>{also}")
    if pretrained and choices.convert != "none":
        raise ConfigError(
            f"mode={cfg.mode} with convert={choices.convert}: a model is converted by mode=convert, or by training; "
            "give checkpoint=<that run>, or leave convert= out"
        )


def _check_task(cfg: DictConfig, composer: Composer) -> None:
    """Refuse groups that the task does not use, and a scale for which it has no recipe."""
    choices = cfg.hydra.runtime.choices
    follows = choices.recipe == f"{choices.task}_{choices.scale}"
    if follows and choices.scale not in (scales := composer.scales(choices.task)):
        raise ConfigError(f"task={choices.task} has no scale={choices.scale}{nearest(choices.scale, scales)}")
    if choices.scale == PRETRAINED and cfg.model is None:
        raise ConfigError(f"scale={PRETRAINED}: give model=<a folder or a name of the hub>, or take another scale")
    if choices.attention is not None and "attention_heads" not in cfg.task:
        raise ConfigError(f"attention={choices.attention}: task={choices.task} brings its own attention; leave it out")
    if choices.compress != "none" and not cfg.task.get("compressible"):
        raise ConfigError(f"compress={choices.compress}: task={choices.task} has no pretrained model to compress")
    if cfg.mode == "compress" and choices.compress == "none" and cfg.task.modes[0] != "compress":
        methods = ", ".join(name for name in composer.options("compress") if name != "none")
        raise ConfigError(f"mode=compress needs compress=<method>, one of {methods}")
    if cfg.mode == "convert" and choices.convert == "none":
        raise ConfigError("mode=convert needs convert=<method>: mla, mtla, tpa or gqa")
    weights = cfg.task.get("weights")
    if choices.convert != "none" and weights is None:
        raise ConfigError(f"convert={choices.convert}: task={choices.task} has no pretrained decoder to convert")
    if cfg.model is not None and weights is None:
        if not any("${model}" in str(raw) for _, raw in config.leaves(config.written(cfg.task))):
            raise ConfigError(f"model={cfg.model}: task={choices.task} trains from random weights, not pretrained ones")
        check_model(cfg.model, cfg.task.model._target_)


def _refuse_knob(cfg: DictConfig, knob: str, composer: Composer) -> NoReturn:
    """Say which mechanisms and methods have a knob that the chosen ones do not read."""
    chosen = [f"{group}={name}" for group in config.KNOB_GROUPS if (name := cfg.hydra.runtime.choices[group])]
    having = [
        f"{group}={option}"
        for group in config.KNOB_GROUPS
        for option in composer.options(group)
        if f"${{{knob}}}" in composer.text(group, option)
    ]
    if set(chosen) & set(having):
        raise ConfigError(f"{knob}={cfg[knob]} has no effect: what it sets is itself set on the command line")
    mechanism = " with ".join(name for name in chosen if not name.endswith("=none")) or chosen[-1]
    raise ConfigError(f"{mechanism} has no {knob}; with one: {', '.join(having) or 'none'}")


# --- a fixed configuration ---------------------------------------------------------------------------------------


def check_relations(cfg: DictConfig) -> None:
    """Check the keys of a resolved configuration that depend on each other, and that `trainer` sets no other's key."""
    for how, names in TRAINER.items():
        if wrong := set(names) & set(cfg.trainer):
            raise ConfigError(f"trainer.{min(wrong)}: attnlab sets it {how}")
    if cfg.callbacks:
        _check_callbacks(cfg)
    if cfg.cache.bits is not None and not cfg.get("attention"):
        raise ConfigError(f"cache.bits={cfg.cache.bits}: task={cfg.task.name} decodes without a cache; leave it out")
    check_ctc(cfg, OmegaConf.select(cfg, "task.decode.ctc_weight"))
    _check_names(cfg)
    if OmegaConf.select(cfg, "task.data.window") is not None:
        _check_lengths(cfg)
    if cfg.mode == "train" and cfg.hardware.strategy == "fsdp":
        kind = definition(str(OmegaConf.select(cfg, "task.kind._target_")))
        if kind and constant(f"{kind[0]}.SHARDED") is False:
            raise ConfigError(f"hardware=fsdp is not supported for task={cfg.task.name}; take hardware=ddp")
    for key in ("compile", "gradient_checkpointing") if "train" not in cfg.task else ():
        if cfg.hardware[key]:
            raise ConfigError(f"hardware.{key}=true: task={cfg.task.name} trains nothing; leave it out")
    for key, of in DIVISORS.items():
        value, multiple = OmegaConf.select(cfg, key), OmegaConf.select(cfg, of)
        if isinstance(value, int) and isinstance(multiple, int) and multiple % value:
            raise ConfigError(f"{key}={value}: expected a divisor of {of}={multiple}")
    size, patch = OmegaConf.select(cfg, "task.data.image_size"), OmegaConf.select(cfg, "task.model.patch_size")
    if size is not None and patch is not None and size % patch:
        raise ConfigError(f"task.data.image_size={size}: expected a multiple of task.model.patch_size={patch}")


def _check_callbacks(cfg: DictConfig) -> None:
    """Refuse a watched metric of unknown direction, and several averages of the weights."""
    means = ["task.ema_decay"] if cfg.task.get("ema_decay") else []
    for name, node in cfg.callbacks.items():
        target = str(node.get("_target_"))
        if "monitor" in node and "mode" not in node and "EarlyStopping" in target:
            raise ConfigError(f"callbacks.{name}.monitor={node.monitor}: give +callbacks.{name}.mode=min or max too")
        if "WeightAveraging" in target:
            means.insert(0, f"callbacks={name}")
            if cfg.hardware.strategy == "fsdp":
                raise ConfigError(f"callbacks={name}: hardware=fsdp shards the weights that it averages")
    if means[1:]:
        raise ConfigError(f"{means[0]}: {means[1]} averages the weights too; choose one of them")


def check_ctc(cfg: DictConfig, weight: float | None) -> None:
    """Refuse joint decoding with this `weight` of a model without a CTC head whose labels are the decoder's."""
    if not weight:
        return
    wrong = f"task.decode.ctc_weight={weight} needs a CTC head with the decoder's labels; "
    if str(OmegaConf.select(cfg, "task.data.features._target_")).endswith("SourceText"):
        raise ConfigError(f"{wrong}models of text have none: set it to 0")
    labels, trained = (OmegaConf.select(cfg, f"task.{key}") for key in ("data.ctc_vocab_size", "train.ctc_weight"))
    if labels != "shared" or not trained:
        raise ConfigError(
            f"{wrong}train with task.data.ctc_vocab_size=shared (now {labels}) and task.train.ctc_weight above 0 (now "
            f"{trained}), or set it to 0"
        )


def _check_names(cfg: DictConfig) -> None:
    """Refuse unknown names of metrics."""
    sources = [file.read_text(encoding="utf-8") for file in METRICS.glob("*.py")]
    metrics = sorted(name for source in sources for name in re.findall(r'^    name = "(\w+)"$', source, re.MULTILINE))
    for key in ("task.score.name", "task.train.validate_score"):
        name = OmegaConf.select(cfg, key)
        if isinstance(name, str) and name not in metrics:
            raise ConfigError(f"{key}={name}: expected one of {', '.join(metrics)}")


def _check_lengths(cfg: DictConfig) -> None:
    """Refuse windows and continuations of a language model that is trained or scored, where they are too long."""

    def get(key: str) -> Any:
        return OmegaConf.select(cfg, key)

    window, longest = get("task.data.eval_window") or get("task.data.window"), get("task.model.max_length")
    if constant(f"attnlab.modes.{cfg.mode}.READS_CORPUS") is not True:
        return
    if (stride := get("task.score.sliding_stride")) is not None and stride > window:
        raise ConfigError(f"task.score.sliding_stride={stride} is more than the window of {window}")
    prompt, new = get("task.score.prompt_tokens"), get("task.sampling.tokens")
    if isinstance(longest, int) and cfg.task.get("weights") is None and prompt + new > longest:
        raise ConfigError(
            f"task.score.prompt_tokens={prompt} and task.sampling.tokens={new} make {prompt + new} positions, more "
            f"than task.model.max_length={longest}"
        )


# --- pretrained models -------------------------------------------------------------------------------------------


def check_model(source: str, target: str) -> None:
    """Refuse a path that does not exist (ConfigError)."""
    path = Path(source).expanduser()
    only_a_path = path.is_absolute() or source.startswith(".")  # no name of a hub has this form
    if target == TIMM:
        if path.exists() and not path.is_dir():
            check_weights("model", source)
        elif not path.exists() and (path.suffix in FILES or only_a_path):
            raise ConfigError(f"model={source}: no such file or folder; give a .safetensors or .pth file, or a run")
    elif path.suffix == GGUF and not path.is_dir():
        if not path.is_file():
            raise ConfigError(f"model={source}: no such GGUF file")
    elif path.is_file():
        raise ConfigError(
            f"model={source}: a file; give its folder, with config.json, tokenizer and *.safetensors, or a {GGUF} file"
        )
    elif not path.exists() and (only_a_path or source.count("/") > 1 or source.endswith("/")):
        raise ConfigError(f"model={source}: no such folder; give a Hugging Face model's folder, or a name of the hub")


def check_weights(key: str, source: str) -> None:
    """Refuse a path that is no file of weights, by its ending (ConfigError)."""
    path = Path(source).expanduser()
    if not path.is_file() or path.suffix not in FILES:
        reason = "" if path.is_file() else "not a file; " if path.exists() else "no such file; "
        raise ConfigError(f"{key}={source}: {reason}expected a file of weights, {', '.join(FILES)}")
