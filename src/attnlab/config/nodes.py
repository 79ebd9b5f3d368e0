"""Check what is built: that each class exists and belongs there, and that each key is declared and its value fits.

A configuration may come from somebody else and must not run commands. So the definition of a `_target_` is looked up in
the source (`schema.py`) before anything is imported: `torch.os.system` is a function of `os`. It must derive from the
base of its place, or be listed there.
"""

import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen, MultipleOf

from attnlab.config.schema import ancestors, definition, siblings, signature
from attnlab.config.settings import ARGUMENTS, SCHEMAS
from attnlab.errors import ConfigError, matches, nearest

_ATTENTION = ("attnlab.attention.Attention",)
_SCALING = ("attnlab.attention.Llama3Scaling",)
_METHOD = ("attnlab.compression.methods.base.Method",)
_MODULE = ("torch.nn.Module",)
# The bases of the classes that a place takes, or functions. `*` stands for one part of a path.
PLACES: Mapping[str, tuple[str, ...]] = {
    "attention": _ATTENTION,
    "attention.mechanisms.*": _ATTENTION,
    "attention.rope_scaling": _SCALING,
    "attention.mechanisms.*.rope_scaling": _SCALING,
    "compress": _METHOD,
    "compress.steps.*": _METHOD,
    "convert": ("attnlab.conversion.base.Conversion",),
    "convert.calibration": ("attnlab.conversion.texts.Calibration",),
    "convert.healing": ("attnlab.conversion.healing.Healing",),
    "bench": ("attnlab.bench.Settings",),
    "logger.*": ("lightning.pytorch.loggers.Logger",),
    "callbacks.*": ("lightning.pytorch.callbacks.Callback",),
    "trainer.profiler": ("lightning.pytorch.profilers.Profiler",),
    "task.kind": ("attnlab.tasks.base.Task",),
    "task.data": ("attnlab.data.base.Data", "attnlab.data.questions.Questions"),
    "task.data.augment": ("attnlab.data.SpecAugment",),
    "task.data.corpus": ("attnlab.data.text.corpora.TextCorpus",),
    "task.data.features": ("attnlab.data.FilterBank", "attnlab.data.StoredFeatures", "attnlab.data.SourceText"),
    "task.data.reader": ("attnlab.data.corpus.Reader",),
    "task.data.vocabulary": ("attnlab.data.Words", "attnlab.data.BytePairs", "attnlab.data.PretrainedTokens"),
    "task.model": (*_MODULE, "attnlab.pretrained.timm.VisionTransformer", "attnlab.tasks.reasoning.model.AskedModel"),
    "task.model.encoder": _MODULE,
    "task.model.decoder": _MODULE,
    "task.model.ordinary": _ATTENTION,
    "task.optimizer": ("torch.optim.Optimizer", "timm.optim.create_optimizer_v2"),
    "task.schedule": ("torch.optim.lr_scheduler.LRScheduler", "timm.scheduler.create_scheduler_v2"),
    "task.decode": ("attnlab.decoding.BeamSearch",),
    "task.sampling": ("attnlab.decoding.Sampling",),
    "task.score": ("attnlab.tasks.language_modelling.score.LanguageScore", "attnlab.tasks.recall.score.RecallScore"),
    "task.score.needle": ("attnlab.tasks.language_modelling.needle.Needle",),
    "task.evaluation": ("attnlab.tasks.harness.Harness",),
    "hydra.launcher": ("hydra.plugins.launcher.Launcher",),
    "hydra.sweeper": ("hydra.plugins.sweeper.Sweeper",),
    "hydra.sweeper.sampler": ("optuna.samplers.BaseSampler",),
}
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
_BOUNDS: dict[type, tuple[str, Callable[[Any, Any], bool], str]] = {  # attribute, check of a value, sign in messages
    Ge: ("ge", operator.ge, ">="),
    Gt: ("gt", operator.gt, ">"),
    Le: ("le", operator.le, "<="),
    Lt: ("lt", operator.lt, "<"),
    MultipleOf: ("multiple_of", lambda value, bound: value % bound == 0, ""),
    MinLen: ("min_length", lambda value, bound: len(value) >= bound, ""),
}


def bases_of(path: str) -> tuple[str, ...]:
    """The bases of the classes that a place takes, by its dotted path; empty: nothing is built there."""
    forms = {pattern.replace(".", r"\.").replace("*", r"[^.]+"): bases for pattern, bases in PLACES.items()}
    return next((bases for form, bases in forms.items() if re.fullmatch(form, path)), ())


def owner(node: Mapping[str, Any], path: str) -> str:
    """The dotted name of what declares a node's keys: its `_target_`, or the schema of its place; empty if neither."""
    schema = SCHEMAS.get(path)
    name = f"{schema.__module__}.{schema.__qualname__}" if schema else ARGUMENTS.get(path, "")
    return str(node.get("_target_") or name)


def parameters(node: Any, path: str) -> Mapping[str, Any]:
    """The parameters of what declares a node's keys; none of a target that the place does not take.

    A signature can compute something, so it is read only of a class that may be built.
    """
    if not isinstance(node, dict):
        return {}
    try:
        if "_target_" in node:
            check_target(node["_target_"], path)
        return signature(owner(node, path)).parameters
    except (ConfigError, LookupError):  # which another check reports
        return {}


def declared(node: Any, path: str, name: str) -> list[Any]:
    """The annotations of a node's key: of its class or schema, and of another library's argument in `FOREIGN`."""
    annotation = parameters(node, path).get(name)
    foreign = FOREIGN.get(f"{path}.{name}" if path else name)
    return [kind for kind in (annotation, foreign) if kind is not None]


def require(key: str, annotation: Any, value: Any) -> None:
    """Raise ConfigError if a value does not fit an annotation."""
    if not fits(annotation, value):
        close = matches(str(value), [str(literal) for literal in literals(annotation)])
        hint = f"; nearest: {close[0]}" if close else ""
        raise ConfigError(f"{key}={'null' if value is None else value}: expected {words(annotation)}{hint}")


def mappings(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping in nested mappings and lists with its dotted path, outer ones first; `path`: of `node`."""
    if isinstance(node, dict):
        yield path, node
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from mappings(child, f"{path}.{key}" if path else str(key))


def targets(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every `_target_` below a node: the path of its node, and the target."""
    return ((place, inner["_target_"]) for place, inner in mappings(node, path) if "_target_" in inner)


def check_target(target: Any, path: str) -> None:
    """Check the `_target_` of a node before it is imported. ConfigError names the key and what its place takes."""
    key, bases = f"{path}._target_={target}", bases_of(path)
    if not isinstance(target, str) or not re.fullmatch(r"\w+(\.\w+)*", target):
        raise ConfigError(f"{key}: expected the dotted name of a class, package.module.Name")
    if not bases:
        raise ConfigError(f"{key}: nothing is built here")
    package = target.partition(".")[0]
    names = set() if package in sys.stdlib_module_names else ancestors(target)
    if not names and package == "attnlab":
        raise ConfigError(f"{key}: no such class{nearest(target, siblings(target))}")
    if not names and package not in sys.stdlib_module_names:
        raise ConfigError(f"{key}: no such class; check its name, and that {package} is installed or in PYTHONPATH")
    if not names & set(map(canonical, bases)):
        raise ConfigError(f"{key}: expected a class derived from {' or '.join(bases)}")


@lru_cache
def canonical(name: str) -> str:
    """A dotted name by the module that defines it."""
    defined = definition(name)
    return ".".join(defined) if defined else name


def check_nodes(node: Any, path: str = "") -> None:
    """Check every node of a configuration, or of a part of it. ConfigError names the key and what is expected."""
    for place, target in targets(node, path):
        check_target(target, place)
    for place, inner in mappings(node, path):
        if not (target := owner(inner, place)):
            continue
        schema = signature(target)
        for key, value in inner.items():
            here = f"{place}.{key}" if place else str(key)
            if key == "_partial_":
                require(here, bool, value)
            elif key in schema.parameters or schema.open:
                _check_value(declared(inner, place, str(key)), here, value)
            elif key != "_target_":
                raise ConfigError(f"{here}: {target} has no parameter {key!r}{nearest(str(key), schema.parameters)}")


def _check_value(annotations: list[Any], key: str, value: Any) -> None:
    if isinstance(value, dict) and "_target_" in value:
        return
    for annotation in annotations:
        require(key, annotation, value)
    kinds = [kind for annotation in annotations for kind in alternatives(annotation)]
    if isinstance(value, int | float | str) and kinds and type(value) not in kinds and bases_of(key):
        raise ConfigError(f"{key}={value}: expected a class derived from {' or '.join(bases_of(key))}")


# --- values and annotations ---------------------------------------------------------------------------------------


def fits(annotation: Any, value: Any) -> bool:
    """Whether a plain value, as YAML holds it, may stand where `annotation` does."""
    return any(_fits(part, value) for part in alternatives(annotation))


def is_text(annotation: Any) -> bool:
    """Whether a key takes texts or paths, and nothing else but null."""
    kinds = [_split(part)[0] for part in alternatives(annotation) if part is not NoneType]
    words = [kind for kind in kinds if get_origin(kind) is Literal and {*map(type, get_args(kind))} == {str}]
    return {str, Path} & {*kinds} != set() and all(kind in (str, Path, *words) for kind in kinds)


def words(annotation: Any) -> str:
    """An annotation in words, for messages: `Annotated[int, Ge(1)] | None` is "int >= 1 or null"."""
    return " or ".join(dict.fromkeys(_words(part) for part in alternatives(annotation)))


def literals(annotation: Any) -> list[Any]:
    """The values that its `Literal`s list."""
    return [value for part in alternatives(annotation) if get_origin(part) is Literal for value in get_args(part)]


def alternatives(annotation: Any) -> Iterator[Any]:
    """The members of a union, each with the bounds that stand around the union."""
    inner, bounds = _split(annotation)
    if get_origin(inner) in (Union, UnionType):
        for part in get_args(inner):
            for member in alternatives(part):
                yield Annotated[member, *bounds] if bounds and member is not NoneType else member
    else:
        yield NoneType if annotation is None else annotation


def _split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """An annotation without `Annotated`, and what that adds."""
    return (annotation.__origin__, annotation.__metadata__) if get_origin(annotation) is Annotated else (annotation, ())


def _is_list(annotation: Any) -> bool:
    return _is(annotation, Iterable) and not _is(annotation, Mapping) and annotation is not str


def _is(annotation: Any, base: type) -> bool:
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, base)


def _fits(annotation: Any, value: Any) -> bool:
    inner, bounds = _split(annotation)
    if get_origin(inner) is Literal:
        return any(type(value) is type(item) and value == item for item in get_args(inner))
    if inner in (Any, object):
        return True
    if value is None or inner is NoneType:
        return value is None and inner is NoneType
    if inner in (int, float):
        kind = int if inner is int else int | float
        right = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
    elif inner in (bool, str, Path):
        right = isinstance(value, bool if inner is bool else str)
    elif _is(inner, Mapping):
        right = isinstance(value, Mapping)
    elif _is_list(inner):
        right = isinstance(value, Sequence) and not isinstance(value, str) and _elements_fit(inner, value)
    else:
        right = True
    return right and all(_BOUNDS[kind][1](value, bound) for kind, bound in _bounds(bounds))


def _elements_fit(annotation: Any, values: Sequence[Any]) -> bool:
    parts = get_args(annotation)
    if get_origin(annotation) is tuple and parts[-1] is not Ellipsis:
        return len(parts) == len(values) and all(map(fits, parts, values))
    return not parts or all(fits(parts[0], value) for value in values)


def _bounds(marks: Iterable[Any]) -> Iterator[tuple[type, Any]]:
    """Kind and value of each bound."""
    for mark in marks:
        if type(mark) in _BOUNDS:
            yield type(mark), getattr(mark, _BOUNDS[type(mark)][0])


def _words(annotation: Any) -> str:
    inner, added = _split(annotation)
    bounds = dict(_bounds(added))
    limits = " and ".join(f"{_BOUNDS[kind][2]} {bounds[kind]}" for kind in (Ge, Gt, Le, Lt) if kind in bounds)
    rest = f" {limits}" if limits else ""
    if MultipleOf in bounds:
        rest += f", a multiple of {bounds[MultipleOf]}"
    if shortest := bounds.get(MinLen, 0):
        rest += ", not empty" if shortest == 1 else f", at least {shortest} long"
    return _type_in_words(inner) + rest


def _type_in_words(annotation: Any) -> str:
    if annotation is NoneType:
        return "null"
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    if _is(annotation, Mapping):
        return "a group of keys"
    if _is_list(annotation):
        parts = [part for part in get_args(annotation) if part is not Ellipsis]
        count = f" of {len(parts)}" if get_origin(annotation) is tuple and len(parts) > 1 else ""
        return f"a list{count}, each {words(parts[0])}" if parts else "a list"
    if annotation is Path:
        return "a path"
    name = getattr(annotation, "__name__", str(annotation))
    return name if annotation in (int, float, bool, str) else f"a {name}"
