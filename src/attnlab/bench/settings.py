"""Settings of mode=bench, and the shape of a row of its table."""

from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Literal

from annotated_types import Ge, MinLen

from attnlab.config.bounds import Size, SizeOrZero

What = Literal[
    "training", "model", "decoding", "beam", "forward", "projections", "whole", "decomposition", "generation",
    "prefill", "kernels",
]  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The `bench` node of a configuration. Widths, heads and layers are those of the task's model.

    Args:
        what: workloads of bench/workloads; None: the default of the task.
        batch: number of rows. Each of several is a row of the table in decoding; elsewhere one belongs to each `text`.
        prefix: length of the encoder's output.
        text: length of a training text or of a prompt; each of several lengths is a row of the table.
        context: number of cached text positions before decoding; each of several is a row of the table.
        reorder: decoding without (false) or with (true) reordering the rows after each step, or both.
        rounds: number of measured rounds, in which the variants take turns.
        warmup: number of earlier rounds, which are not measured.
        memory: whether to measure peak memory, in a separate process for each number.
        references: names in conf/attention, `published`, or `published_<name>`; for decomposition `tensorly`. A name
            may have a value, as in mtla.stride=4, and occur with several values. `compiled` and `compiled_<name>`: the
            same mechanism with compiled steps, on a CPU. `int8` and `int8_<name>`: with weights of 8 bits. `llama`,
            `llama_static` and `llama_compiled`: the Llama of transformers with its growing cache, with its preallocated
            cache, and with that and torch.compile, for generation, prefill and model. Ignored with `convert=`, which
            compares the converted model with the original.
        overrides: values of a reference, for instance mha.num_heads=12, which also applies to `compiled_mha`.

    Raises:
        ValueError: a reference has a key without a value.
    """

    what: What | list[str] | None = None
    batch: Size | Annotated[list[Size], MinLen(1)] = 1
    beam: Size = 1
    prefix: SizeOrZero = 0
    text: Size | Annotated[list[Size], MinLen(1)] = 512
    context: SizeOrZero | Annotated[list[SizeOrZero], MinLen(1)] = 0
    steps: Annotated[int, Ge(1)] = 32
    reorder: Annotated[list[bool], MinLen(1)] = field(default_factory=lambda: [False, True])
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    rounds: Annotated[int, Ge(1)] = 5
    warmup: Annotated[int, Ge(0)] = 1
    memory: bool = True
    references: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for reference in self.references:
            if "." in reference and "=" not in reference:
                raise ValueError(f"references: {reference}: expected NAME or NAME.KEY=VALUE")
        each = self.kinds and {*self.kinds} <= {"decoding", "generation"}  # each batch is a row
        if len(self.batches) > 1 and not each and len(self.batches) != len(self.texts):
            raise ValueError(f"batch={self.batches}: expected one number, or one for each of text={self.texts}")

    def overrides_of(self, reference: str) -> list[str]:
        """KEY=VALUE of this reference."""
        return [override.partition(".")[2] for override in self.overrides if override.startswith(f"{reference}.")]

    @property
    def kinds(self) -> list[str]:
        return [self.what] if isinstance(self.what, str) else list(self.what or ())

    @property
    def batches(self) -> list[int]:
        return [self.batch] if isinstance(self.batch, int) else list(self.batch)

    @property
    def texts(self) -> list[int]:
        return [self.text] if isinstance(self.text, int) else list(self.text)

    @property
    def contexts(self) -> list[int]:
        return [self.context] if isinstance(self.context, int) else list(self.context)


@dataclass(frozen=True)
class Shape:
    """One row of the table.

    Args:
        text: length of a training text or of an image, or number of cached steps after the first.
        reorder: for decoding, whether rows are reordered after each step.
        context: for decoding, number of text positions that are already cached.
    """

    what: str
    batch: int
    beam: int
    prefix: int
    text: int
    reorder: bool = False
    context: int = 0

    @property
    def tokens(self) -> int:
        """Number of new positions that a measured run computes."""
        return self.batch * self.text * (self.beam if self.what == "beam" else 1)


def summary(values: list[float]) -> dict[str, float]:
    """Median and spread of repeated measurements, at least one."""
    return {"median": rounded(median(values)), "min": rounded(min(values)), "max": rounded(max(values))}


def rounded(value: float, digits: int = 4) -> float:
    """Round to `digits` significant digits."""
    return float(f"{value:.{digits}g}")
