"""The keys that no class takes, with types and bounds: of the root, the hardware, the task and its training.

A node with a `_target_` is checked against the signature that it names. The nodes of SCHEMAS have none: there the
fields of a dataclass say which values a key may have. Nothing instantiates them; they are read as source, as every
signature is (:mod:`attnlab.config.schema`). What other libraries' arguments may be, and how keys must relate to each
other, is in :mod:`attnlab.config.rules`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen

from attnlab.config.annotation import File
from attnlab.config.bounds import Size
from attnlab.config.schema import constant


@dataclass(frozen=True)
class ReadBy:
    """Marks a root key that only some modes read; others refuse it. `optional`: those that can do without it."""

    modes: tuple[str, ...]
    optional: tuple[str, ...] = ()


@dataclass(frozen=True)
class Root:
    """The keys of conf/config.yaml that are no group; its comments say what they are.

    `mode` is a file in modes/ that the task lists in `task.modes`.
    """

    mode: str
    seed: Annotated[int, Ge(0), Le(4294967295)]  # numpy's bound
    stride: Size | None
    rank: Size | None
    data_root: Path | None
    model: Annotated[str, MinLen(1)] | None
    checkpoint: Annotated[
        Path | None, ReadBy(("test", "predict", "generate", "evaluate", "describe", "export"), ("describe", "export"))
    ]
    prompt: Annotated[str | None, ReadBy(("generate",))]
    format: Annotated[Literal["hf", "safetensors", "deepseek"] | None, ReadBy(("export",))]
    input: Annotated[str | None, ReadBy(("predict",))]
    output: Annotated[Path | None, ReadBy(("predict",))]
    resume: Annotated[Path | None, ReadBy(("train",))]
    baseline: Annotated[Path | None, ReadBy(("train", "test", "compress"))]
    retry: bool
    rerun: bool
    tags: list[Annotated[str, MinLen(1)]]
    cache_dir: Annotated[Path, MinLen(1)]


@dataclass(frozen=True)
class Hardware:
    """The arguments of Lightning's Trainer that say where and how fast a run happens, and what changes no result.

    Args:
        accelerator: auto: a GPU if there is one, else the CPU.
        devices: how many on each node, their numbers, or auto.
        num_nodes: machines.
        strategy: how processes share the work, as Lightning calls it.
        precision: of weights and arithmetic, as Lightning calls it; auto: see :mod:`attnlab.config.hardware`.
        tf32: whether CUDA devices round the factors of float32 matrix products to 10 bits, which is much faster.
        compile: whether torch.compile is used, where there is a compiler; each task says which part it compiles.
        gradient_checkpointing: whether each layer is computed again in the backward pass, which needs less memory.
        loss_chunk: tokens whose logits exist at once in training; auto: as many as 1 GiB of float32 holds; null: all.
        find_batch: whether the largest batch of one process that fits is searched before training.
        find_batch_gib: the memory for that search, in GiB; null: what the GPU has free.
    """

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"]
    devices: Annotated[int, Ge(1)] | Literal["auto"] | Annotated[list[Annotated[int, Ge(0)]], MinLen(1)]
    num_nodes: Annotated[int, Ge(1)]
    strategy: Literal["auto", "ddp", "ddp_find_unused_parameters_true", "fsdp"]
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true"]
    tf32: bool
    compile: bool
    gradient_checkpointing: bool
    loss_chunk: Annotated[int, Ge(1)] | Literal["auto"] | None
    find_batch: bool
    find_batch_gib: Annotated[float, Gt(0)] | None


@dataclass(frozen=True)
class Task:
    """The keys that several tasks have. A task may have others, which stand in its own file.

    Args:
        name: of the task, for records.
        modes: what it can do; the first is its default.
        target: of speech: its translation or its transcript.
        encoder_checkpoint: a run whose encoder this one starts with; null: random weights.
        attention_heads: H, read by conf/attention.
        attention_head_dim: D, read by conf/attention.
        attention_bias: whether the projections of MHA have biases.
        attention_dropout: of attention weights.
        attention_prefix: whether the encoder's output stands before the text.
        attention_rank: R of the multi-linear forms; null: that of their own file.
        attention_window: positions that the windowed multi-linear forms see; null: that of their own file.
        decode_max_frames: frames of 10 ms in a decoding batch, at most.
        compressible: whether there is a pretrained model to compress.
        channels_last: whether images lie in memory with their channels last.
        label_smoothing: share of the probability that goes to all classes.
        ema_decay: of averaged weights; 0: none.
        ema_warmup: whether the decay begins low.
        questions: the set of questions.
        compat: whether scores are computed as by the released code, with its defects.
        batch_size: rows in a batch of one process.
        search: settings to choose from by the validation split; null: none.
        weights: the pretrained decoder that the model begins with; follows from `model=` and `convert=`.
        sample_facts: updates in which the sample of a pretrained decoder learns to recall; 0: it recalls nothing.
    """

    name: Annotated[str, MinLen(1)]
    modes: Annotated[list[str], MinLen(1)]
    target: Literal["translation", "transcript"] | None
    encoder_checkpoint: Path | None
    attention_heads: Size
    attention_head_dim: Size
    attention_bias: bool
    attention_dropout: Annotated[float, Ge(0), Lt(1)]
    attention_prefix: bool
    attention_rank: Size | None
    attention_window: Size | None
    decode_max_frames: Annotated[int, Ge(1)]
    compressible: bool
    channels_last: bool
    label_smoothing: Annotated[float, Ge(0), Lt(1)]
    ema_decay: Annotated[float, Ge(0), Lt(1)]
    ema_warmup: bool
    questions: Literal["hotpotqa", "fever", "bios", "wikidata"]
    compat: bool
    batch_size: Annotated[int, Ge(1)]
    search: Annotated[list[dict[str, Any]], MinLen(1)] | None
    weights: str | None
    sample_facts: Annotated[int, Ge(0)]


@dataclass(frozen=True)
class Train:
    """How long and how a task trains. -1 updates: until `max_epochs` or `max_minutes`.

    Args:
        max_steps: updates; -1: no limit.
        max_epochs: passes over the training split; null: no limit.
        max_minutes: minutes of training; null: no limit.
        batch: what one update sees, see `Batch`.
        clip: norm to which gradients are cut; 0: they are not.
        label_smoothing: share of the probability that goes to all pieces or words alike.
        ctc_weight: weight of the CTC loss beside the decoder's.
        first_token_weight: weight of the first token's loss, which names the class.
        validate_every: updates between validations; null: by epochs.
        validate_every_epochs: epochs between validations.
        validate_decode: sentences of each validation that are decoded and scored; null: none.
        validate_score: the metric of these; null: that of the test set.
        validate_search: settings of their search, see `ValidationSearch`.
        monitor: the metric that checkpoints are chosen by; null: the task's own.
        keep_best: checkpoints that are kept, and averaged at the end.
        log_every: updates between points of the curves.
    """

    max_steps: Annotated[int, Ge(1)] | Literal[-1]
    max_epochs: Annotated[int, Ge(1)] | None
    max_minutes: Annotated[float, Gt(0)] | None
    batch: dict[str, Any]
    clip: Annotated[float, Ge(0)]
    label_smoothing: Annotated[float, Ge(0), Lt(1)]
    ctc_weight: Annotated[float, Ge(0)]
    first_token_weight: Annotated[float, Ge(0)]
    validate_every: Annotated[int, Ge(1)] | None
    validate_every_epochs: Annotated[int, Ge(1)]
    validate_decode: Annotated[int, Ge(1)] | None
    validate_score: str | None
    validate_search: dict[str, Any]
    monitor: str | None
    keep_best: Annotated[int, Ge(1)]
    log_every: Annotated[int, Ge(1)]


@dataclass(frozen=True)
class Batch:
    """What one update sees, on all processes together: one of `tokens`, `images`, `sequences` and `frames`.

    `bucket`: frames of a group of sentences of similar length, padding included; `frames` is a multiple of it.
    `split`: whether a bucket may be divided into several batches; BatchNorm needs false, and sees whole buckets.
    """

    tokens: Annotated[int, Ge(1)]
    images: Annotated[int, Ge(1)]
    sequences: Annotated[int, Ge(1)]
    frames: Annotated[int, Ge(1)]
    bucket: Annotated[int, Ge(1)]
    split: bool


@dataclass(frozen=True)
class ValidationSearch:
    """The search that decodes validation sentences, where it differs from `task.decode`. null: as there.

    Args:
        beam: hypotheses of a sentence; 1 is greedy search.
        max_len_a, max_len_b: at most max_len_a * S + max_len_b tokens, S the length of the prefix.
        temperature: divides the logits.
    """

    beam: Annotated[int, Ge(1)] | None
    max_len_a: Annotated[float, Ge(0)] | None
    max_len_b: Annotated[int, Ge(0)] | None
    temperature: Annotated[float, Gt(0)] | None


@dataclass(frozen=True)
class Pretraining:
    """Training from scratch, where an image task has no checkpoint.

    Args:
        epochs: passes over the training split; 0: none.
        lr: the highest learning rate.
        weight_decay: of AdamW.
        warmup_epochs: epochs over which the learning rate rises.
    """

    epochs: Annotated[int, Ge(0)]
    lr: Annotated[float, Ge(0)]
    weight_decay: Annotated[float, Ge(0)]
    warmup_epochs: Annotated[int, Ge(0)]


@dataclass(frozen=True)
class Mixup:
    """Images mixed in pairs, as timm does it.

    Args:
        mixup_alpha, cutmix_alpha: parameters of the beta distributions; 0: off.
        prob: share of batches that are mixed.
        switch_prob: share of them with CutMix, where both are on.
    """

    mixup_alpha: Annotated[float, Ge(0)]
    cutmix_alpha: Annotated[float, Ge(0)]
    prob: Annotated[float, Ge(0), Le(1)]
    switch_prob: Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True)
class Text:
    """The text of a perplexity, cut into windows of `context` tokens.

    Args:
        file: a text file; null: no perplexity is measured.
        context: tokens of a window.
    """

    file: Annotated[Path, File()] | None
    context: Annotated[int, Ge(2)]


SCHEMAS: dict[str, type] = {
    "": Root,
    "hardware": Hardware,
    "task": Task,
    "task.train": Train,
    "task.train.batch": Batch,
    "task.train.validate_search": ValidationSearch,
    "task.pretrain": Pretraining,
    "task.mixup": Mixup,
    "task.text": Text,
}
ARGUMENTS = {"trainer": "lightning.pytorch.trainer.trainer.Trainer"}  # nodes with the arguments of one class
OPEN = (Root, Task)  # may have keys that are not listed: groups and a task's own
MODES = tuple(sorted(path.stem for path in (Path(__file__).parents[1] / "modes").glob("[!_]*.py")))


def modes_of_every_task() -> tuple[str, ...]:
    """The modes that a task need not list: those whose file says `EVERY_TASK = True`."""
    return tuple(mode for mode in MODES if constant(f"attnlab.modes.{mode}.EVERY_TASK") is True)


def read_by() -> dict[str, ReadBy]:
    """The root keys that only some modes read."""
    hints = get_type_hints(Root, include_extras=True)
    return {
        key: marker
        for key, hint in hints.items()
        for marker in getattr(hint, "__metadata__", ())
        if isinstance(marker, ReadBy)
    }


def owner(node: Mapping[str, Any], path: str) -> str:
    """The dotted name of what declares a node's keys: its `_target_`, or the schema of its place; empty if neither.

    Args:
        node: with its keys.
        path: of the node, dotted.
    """
    schema = SCHEMAS.get(path)
    name = f"{schema.__module__}.{schema.__qualname__}" if schema else ARGUMENTS.get(path, "")
    return str(node.get("_target_") or name)
