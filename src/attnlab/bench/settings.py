"""What mode=bench is asked to measure."""

import itertools
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

KINDS = ("training", "model", "decoding", "beam")


@dataclass(frozen=True)
class Settings:
    """The `bench` node of a configuration.  Widths and heads are those of the task's model.

    training: forward and backward of one attention layer, `batch` x `text` positions after `prefix` prefix positions;
    model: the same of the task's whole model, loss included;
    decoding: `steps` cached steps of one attention layer, `batch` rows, each after its own prefix and `context`
    positions of text, whose cache is filled at random;
    beam: beam search over the task's decoder, `batch` sentences, `beam` hypotheses of `steps` tokens each;
    None: training, decoding, and beam where the decoder reads a prefix, else model.
    """

    what: Literal["training", "model", "decoding", "beam"] | list[str] | None = None
    batch: int = 1
    beam: int = 1
    prefix: int = 0
    text: int | list[int] = 512  # several: one row of the table each
    context: int | list[int] = 0  # of decoding; several: one row of the table each
    steps: int = 32
    reorder: list[bool] = field(default_factory=lambda: [False, True])  # decoding: rows in a new order after each step
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    rounds: int = 5  # measured, after `warmup` rounds that are not
    warmup: int = 1
    memory: bool = True  # peak memory too, each in a process of its own
    references: list[str] = field(default_factory=list)  # names in conf/attention, `published`, `published_<name>`
    overrides: list[str] = field(default_factory=list)  # a reference's own values: mha.num_heads=12
    published: str = "attnlab.attention.ops.published.of"  # module -> the published algorithm with the same weights

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"what={kind}: expected {', '.join(KINDS)}, or a list of these")
        least = {"batch": 1, "beam": 1, "prefix": 0, "steps": 1, "rounds": 1, "warmup": 0}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least {smallest}")
        if not self.texts or min(self.texts) < 1:
            raise ValueError(f"text={self.text}: expected at least 1")
        if not self.contexts or min(self.contexts) < 0:
            raise ValueError(f"context={self.context}: expected at least 0")
        if not self.reorder:
            raise ValueError("reorder=[]: expected true, false or both")
        for override in self.overrides:
            if override.partition(".")[0] not in self.references or "=" not in override:
                raise ValueError(f"overrides: {override}: expected REFERENCE.KEY=VALUE")

    def overrides_of(self, reference: str) -> list[str]:
        """KEY=VALUE of this reference."""
        return [override.partition(".")[2] for override in self.overrides if override.startswith(f"{reference}.")]

    @property
    def kinds(self) -> list[str]:
        return [self.what] if isinstance(self.what, str) else list(self.what or ())

    @property
    def texts(self) -> list[int]:
        return [self.text] if isinstance(self.text, int) else list(self.text)

    @property
    def contexts(self) -> list[int]:
        return [self.context] if isinstance(self.context, int) else list(self.context)


@dataclass(frozen=True)
class Shape:
    """One row of the table: the settings with one text length."""

    what: str
    batch: int
    beam: int
    prefix: int
    text: int  # positions per row: of a training step, or cached steps after the first
    reorder: bool = False  # decoding: rows are put into a new order after each step
    context: int = 0  # decoding: positions of text already cached

    @property
    def tokens(self) -> int:
        """New positions that one measured run computes."""
        return self.batch * self.text * (self.beam if self.what == "beam" else 1)

    def describe(self) -> dict[str, int | bool | str]:
        """The numbers that matter to this kind of measurement."""
        found: dict[str, int | bool | str] = {"what": self.what, "batch": self.batch, "prefix": self.prefix}
        if self.what == "beam":
            found["beam"] = self.beam
        found["steps" if self.what in ("decoding", "beam") else "text"] = self.text
        if self.what == "decoding":
            found |= {"context": self.context, "reorder": self.reorder}
        return found


def shapes(settings: Settings) -> list[Shape]:
    """Every row of the table, in the order of `what`."""
    rows = []
    for kind in settings.kinds:
        common = kind, settings.batch, settings.beam, settings.prefix
        if kind == "decoding":
            ways = itertools.product(settings.contexts, settings.reorder)
            rows += [Shape(*common, settings.steps, reorder, context) for context, reorder in ways]
        else:
            texts = settings.texts if kind in ("training", "model") else [settings.steps]
            rows += [Shape(*common, text) for text in texts]
    return rows


def summary(values: list[float]) -> dict[str, float]:
    """Median and spread of repeated measurements."""
    found = {"median": median(values), "min": min(values), "max": max(values)}
    return {name: rounded(value) for name, value in found.items()}


def rounded(value: float, digits: int = 4) -> float:
    """To so many significant digits."""
    return float(f"{value:.{digits}g}")
