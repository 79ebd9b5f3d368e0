"""The keys that no class takes, with types and bounds: of the root, the hardware, the task and its training.

The nodes of SCHEMAS have no `_target_`: the fields of a dataclass are their schema. It is read as source, as every
signature is (:mod:`attnlab.config.schema`), and never instantiated.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

from attnlab.config.bounds import Size


@dataclass(frozen=True)
class Root:
    """The keys of conf/config.yaml, with their comments there. `choices`: the options of a fixed configuration."""

    mode: str
    seed: Annotated[int, Ge(0), Le(4294967295)]  # numpy's bound
    stride: Size | None
    rank: Size | None
    data_root: Annotated[Path, MinLen(1)] | None
    model: Annotated[str, MinLen(1)] | None
    checkpoint: Path | None
    prompt: str | None
    format: Literal["hf", "vllm", "deepseek", "safetensors"] | None  # deepseek: the earlier name of vllm
    dtype: Literal["bfloat16", "float16", "float32"] | None
    prove: dict[str, Any]
    input: str | None
    output: Path | None
    resume: Path | None
    baseline: Path | None
    retry: bool
    rerun: bool
    tags: list[Annotated[str, MinLen(1)]]
    cache: dict[str, Any]
    cache_dir: Annotated[Path, MinLen(1)]
    scale: str
    task: dict[str, Any]
    attention: dict[str, Any] | None
    compress: dict[str, Any] | None
    convert: dict[str, Any] | None
    hardware: dict[str, Any]
    bench: dict[str, Any]
    logger: dict[str, Any]
    callbacks: dict[str, Any]
    trainer: dict[str, Any]
    choices: dict[str, Any]


@dataclass(frozen=True)
class Proof:
    """The keys of `prove`, with their comments in conf/config.yaml."""

    python: Annotated[str, MinLen(1)] | None
    prompts: Annotated[int, Ge(4)]
    tokens: Annotated[int, Ge(1)]
    requests: list[Size]
    length: Size


@dataclass(frozen=True)
class CacheSettings:
    """The keys of `cache`, with their comments in conf/config.yaml."""

    bits: Literal[8, 4] | None


@dataclass(frozen=True)
class Hardware:
    """Where and how fast a run happens; the comments in conf/hardware/auto.yaml explain the keys."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"]
    devices: Annotated[int, Ge(1)] | Literal["auto"] | Annotated[list[Annotated[int, Ge(0)]], MinLen(1)]
    num_nodes: Annotated[int, Ge(1)]
    strategy: Literal["auto", "ddp", "ddp_find_unused_parameters_true", "fsdp"]
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true"]
    tf32: bool
    weights: Literal["float32", "bfloat16", "int8"]
    compile: bool
    gradient_checkpointing: bool
    loss_chunk: Annotated[int, Ge(1)] | Literal["auto"] | None
    find_batch: bool
    find_batch_gib: Annotated[float, Gt(0)] | None


@dataclass(frozen=True)
class Task:
    """The keys of tasks; the files in conf/task explain them."""

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
    compressible: bool  # there is a pretrained model to compress
    channels_last: bool  # memory layout of images
    trained: Literal["all", "head"]
    label_smoothing: Annotated[float, Ge(0), Lt(1)]
    ema_decay: Annotated[float, Ge(0), Lt(1)]
    ema_warmup: bool  # the decay begins low
    questions: Literal["hotpotqa", "fever", "bios", "wikidata"]
    compat: bool
    batch_size: Annotated[int, Ge(1)]
    search: Annotated[list[dict[str, Any]], MinLen(1)] | None
    weights: str | None
    match: Literal["parameters"] | None
    sample_facts: Annotated[int, Ge(0)]
    sample_keys: Annotated[int, Ge(0)]
    kind: dict[str, Any]
    data: dict[str, Any]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    train: dict[str, Any]
    pretrain: dict[str, Any]
    mixup: dict[str, Any]
    decode: dict[str, Any]
    sampling: dict[str, Any]
    score: dict[str, Any]
    evaluation: dict[str, Any]
    text: dict[str, Any]
    grids: dict[str, Any]


@dataclass(frozen=True)
class Train:
    """The training of a task; the files in conf/task and conf/recipe explain the keys.

    `max_steps=-1`: `max_epochs` or `max_minutes` ends training.
    """

    max_steps: Annotated[int, Ge(1)] | Literal[-1]  # updates; -1: no limit
    max_epochs: Annotated[int, Ge(1)] | None
    max_minutes: Annotated[float, Gt(0)] | None
    batch: dict[str, Any]
    clip: Annotated[float, Ge(0)]  # norm of gradients; 0: they are not clipped
    label_smoothing: Annotated[float, Ge(0), Lt(1)]
    ctc_weight: Annotated[float, Ge(0)]  # of the CTC loss beside the decoder's
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
    """The size of an update on all processes: one of `tokens`, `images`, `sequences` and `frames`.

    `bucket`, `split`: see :func:`attnlab.config.batch.share_frames`; BatchNorm needs split=false.
    """

    tokens: Annotated[int, Ge(1)]
    images: Annotated[int, Ge(1)]
    sequences: Annotated[int, Ge(1)]
    frames: Annotated[int, Ge(1)]
    bucket: Annotated[int, Ge(1)]
    split: bool


@dataclass(frozen=True)
class ValidationSearch:
    """The search that decodes validation sentences; null: the value of `task.decode`."""

    beam: Annotated[int, Ge(1)] | None
    max_len_a: Annotated[float, Ge(0)] | None
    max_len_b: Annotated[int, Ge(0)] | None
    temperature: Annotated[float, Gt(0)] | None


@dataclass(frozen=True)
class Score:
    """How generated texts are scored; conf/task/base/sequence_to_text.yaml explains the keys."""

    name: str
    tokenize: Literal["13a", "zh", "ja-mecab", "ko-mecab", "flores200", "char", "none", "ascii", "unicode"] | None


@dataclass(frozen=True)
class Pretraining:
    """Training from scratch, where an image task has no checkpoint. 0 epochs: none."""

    epochs: Annotated[int, Ge(0)]
    lr: Annotated[float, Ge(0)]
    weight_decay: Annotated[float, Ge(0)]
    warmup_epochs: Annotated[int, Ge(0)]


@dataclass(frozen=True)
class Mixup:
    """Images mixed in pairs, with the arguments of timm's Mixup; an alpha of 0 turns its form off."""

    mixup_alpha: Annotated[float, Ge(0)]
    cutmix_alpha: Annotated[float, Ge(0)]
    prob: Annotated[float, Ge(0), Le(1)]
    switch_prob: Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True)
class Text:
    """The text of a perplexity, cut into windows of `context` tokens; no file: no perplexity is measured."""

    file: Path | None
    context: Annotated[int, Ge(2)]


SCHEMAS: dict[str, type] = {
    "": Root,
    "prove": Proof,
    "cache": CacheSettings,
    "hardware": Hardware,
    "task": Task,
    "task.train": Train,
    "task.train.batch": Batch,
    "task.train.validate_search": ValidationSearch,
    "task.score": Score,
    "task.pretrain": Pretraining,
    "task.mixup": Mixup,
    "task.text": Text,
}
ARGUMENTS = {"trainer": "lightning.pytorch.trainer.trainer.Trainer"}  # nodes with the arguments of one class
MODES = tuple(sorted(path.stem for path in (Path(__file__).parents[1] / "modes").glob("[!_]*.py")))

# What older records and runs mean in today's words, by the place of a node or by its class.
# Keys that were added later -> what their absence meant: a value equal to that counts as absent, so that adding an
# option changes no identity.
ABSENT: dict[str, dict[str, Any]] = {
    "bench": {"context": 0, "reorder": [False, True]},
    "cache": {"bits": None},
    "hardware": {"tf32": True, "weights": "float32"},
    "task": {"match": None, "sample_facts": 0, "sample_keys": 0, "trained": "all"},
    "task.train": {
        "first_token_weight": 1.0,
        "label_smoothing": 0.0,
        "monitor": None,
        "validate_decode": None,
        "validate_score": None,
        "validate_search": dict.fromkeys(("beam", "max_len_a", "max_len_b", "temperature")),
    },
    "Evaluation": {"spread": False, "mean": None},
    "TransformersEvaluation": {"spread": False, "mean": None},
    "Calibration": {"facts": 0.0},
    "Healing": {"facts": 0.0},
    "Needle": {"keys": 1, "hops": 1, "forms": ["calibration"]},
    "SpeechEncoder": {"mix_layers": None},
    "ConformerEncoder": dict.fromkeys(("mix_layers", "projection_dim", "attention_dropout", "activation_dropout")),
    "StoredFeatures": {"layers": None},
    "CrossDecoder": {
        "tie_embeddings": True,
        "final_norm": None,
        "projector_dim": None,
        "attention_dropout": 0.0,
        "activation_dropout": None,
    },
    "Questions": {"shuffle": None, "share": 0.2},
    "Decoder": {"embedding_dropout": None, "embedding_std": 0.02},
    "AbsoluteMultiLinear": {"core": "free"},
    "RelativeMultiLinear": {"core": "free"},
    "TiedMultiLinear": {"core": "free"},
    "SequenceToTextData": {"unknown_labels": False, "speeds": None, "normalisation": "nmt_nfkc", "strict": False},
    "SpecAugment": {"time_warp": 0},
    "BeamSearch": {"length_penalty_form": "power", "temperature": 1.0, "unknown": True, "ctc_weight": 0.0},
    "LanguageScore": {
        "needle": {
            "_target_": "Needle",
            "lengths": None,
            "depths": [0.0, 0.25, 0.5, 0.75, 1.0],
            "trials": 16,
            "asks": "number",
            "digits": 5,
            "seed": 1,
        }
    },
    "TensorizedTransformer": {"variational_dropout": False},
    "InverseSquareRoot": {"floor": 0.0},
    "ToMLA": {"norm": "none"},
    "TruncAtt": {"vo": "truncatt", "keep_of": "parameters"},
    "GlobalSVD": {"vo": "truncatt", "keep_of": "parameters"},
    "CPSlimAtt": {"vo": "truncatt", "keep_of": "parameters", "start": "global", "restarts": 4, "fusion": "free"},
    "IrrAtt": {"vo": "truncatt", "keep_of": "parameters", "restarts": 4},
    "MHA": {"qk_norm": False, "rope_scaling": None, "norm_eps": 1e-6},
    "SlidingWindow": {"qk_norm": False, "rope_scaling": None, "norm_eps": 1e-6, "sinks": 0},
    "MLAWindow": {"sinks": 0},
    "TextFiles": {"documents": "lines"},
}
