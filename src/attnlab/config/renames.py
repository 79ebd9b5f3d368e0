"""What the keys and classes of an older configuration are called today. One line for each key that is renamed or added.

Run identities, old checkpoints and old records are read through this table, so that they keep their meaning; an old
key on the command line is refused with its new name.

A key is a dotted path from the root, `task.train.clip`, or a parameter of a class wherever it is used, `MTLA.stride`.
Classes and functions of this package are known by their name alone, `MTLA`: moving one to another module needs no
line, renaming one does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Renames:
    """The tables.

    Args:
        keys: old key -> new key. A node moves with everything in it.
        removed: key that no longer exists -> what to write instead, one sentence for the error message.
        absent: key that was added later -> what its absence meant. A value equal to that counts as absent, so that
            adding an option changes no identity.
        classes: old name of a class or function -> new name. Whole dotted paths are allowed for foreign ones.
        overlays: old name of an overlay, in commands of old records -> what to write instead of `experiment=`.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    overlays: Mapping[str, str] = field(default_factory=dict)


RENAMES = Renames(
    keys={
        "bench.prompt": "bench.prefix",
        "task.attention_prompt": "task.attention_prefix",
        "AbsoluteMultiLinear.reads_prompt": "AbsoluteMultiLinear.reads_prefix",
        "RelativeMultiLinear.reads_prompt": "RelativeMultiLinear.reads_prefix",
        "SummedMultiLinear.reads_prompt": "SummedMultiLinear.reads_prefix",
        "TiedMultiLinear.reads_prompt": "TiedMultiLinear.reads_prefix",
    },
    removed={
        "task.train.accumulate": "it follows from the number of processes; task.train.batch is what one update sees",
        "bench.published": "measurements always compare with attnlab.bench.baselines",
        "task.model.checkpoint": "write model=..., a local file or folder or a name of the hub",
    },
    absent={
        "bench.context": 0,
        "bench.reorder": [False, True],
        "hardware.tf32": True,
        "task.sample_facts": 0,
        "task.train.first_token_weight": 1.0,
        "task.train.label_smoothing": 0.0,
        "task.train.monitor": None,
        "task.train.validate_decode": None,
        "task.train.validate_score": None,
        "task.train.validate_search": dict.fromkeys(("beam", "max_len_a", "max_len_b", "temperature")),
        "SpeechEncoder.mix_layers": None,
        "ConformerEncoder.mix_layers": None,
        "ConformerEncoder.projection_dim": None,
        "StoredFeatures.layers": None,
        "CrossDecoder.tie_embeddings": True,
        "CrossDecoder.final_norm": None,
        "CrossDecoder.projector_dim": None,
        "CrossDecoder.attention_dropout": 0.0,
        "CrossDecoder.activation_dropout": None,
        "Decoder.embedding_dropout": None,
        "Decoder.embedding_std": 0.02,
        "AbsoluteMultiLinear.core": "free",
        "RelativeMultiLinear.core": "free",
        "SummedMultiLinear.core": "free",
        "TiedMultiLinear.core": "free",
        "SequenceToTextData.unknown_labels": False,
        "SequenceToTextData.speeds": None,
        "SpecAugment.time_warp": 0,
        "BeamSearch.length_penalty_form": "power",
        "BeamSearch.temperature": 1.0,
        "BeamSearch.unknown": True,
        "LanguageScore.needle": {
            "_target_": "Needle",
            "lengths": None,
            "depths": [0.0, 0.25, 0.5, 0.75, 1.0],
            "trials": 16,
            "asks": "number",
            "digits": 5,
            "seed": 1,
        },
        "TensorizedTransformer.variational_dropout": False,
        "InverseSquareRoot.floor": 0.0,
        "TruncAtt.vo": "truncatt",
        "TruncAtt.keep_of": "parameters",
        "GlobalSVD.vo": "truncatt",
        "GlobalSVD.keep_of": "parameters",
        "CPSlimAtt.vo": "truncatt",
        "CPSlimAtt.keep_of": "parameters",
        "CPSlimAtt.start": "global",
        "CPSlimAtt.restarts": 4,
        "CPSlimAtt.fusion": "free",
        "IrrAtt.vo": "truncatt",
        "IrrAtt.keep_of": "parameters",
        "IrrAtt.restarts": 4,
        "MLPSVD.keep_of": "parameters",
        "MHA.qk_norm": False,
        "MHA.rope_scaling": None,
        "MHA.norm_eps": 1e-6,
        "SlidingWindow.qk_norm": False,
        "SlidingWindow.rope_scaling": None,
        "SlidingWindow.norm_eps": 1e-6,
    },
    overlays={
        "asr_digits": "task=mustc attention=mtla task.target=transcript",
        "mtla_bench_beam": "experiment=mtla/bench_beam",
        "mtla_bench_decoding": "experiment=mtla/bench_decoding",
        "multilinear_bench": "experiment=tensorized/bench_absolute",
        "multilinear_bench_relative": "experiment=tensorized/bench_relative",
        "slu_picovoice": "experiment=corpora/picovoice",
        "tpa_bench_decoding": "experiment=t6/bench_decoding",
        "wikitext2_gqa": "task=wikitext2 scale=comparison attention=gqa",
        "wikitext2_mha": "task=wikitext2 scale=comparison attention=mha",
        "wikitext2_mla": "task=wikitext2 scale=comparison attention=mla",
        "wikitext2_mtla": "task=wikitext2 scale=comparison attention=mtla stride=2",
        "wikitext2_multilinear": "task=wikitext2 scale=comparison attention=multilinear rank=48 attention.window=25",
        "wikitext2_tpa": "task=wikitext2 scale=comparison attention=tpa",
    },
)


def advice(key: str, owner: str = "") -> str | None:
    """What to write instead of an old key of the command line; None if `key` is not one.

    Args:
        owner: the name of the class beside whose `_target_` the key stands, if there is one.
    """
    parent, _, last = key.rpartition(".")
    for old in (key, f"{owner}.{last}"):
        if old in RENAMES.keys:
            return f"{key} was renamed: write {parent}.{RENAMES.keys[old].rpartition('.')[2]}"
        if old in RENAMES.removed:
            return f"{key} was removed: {RENAMES.removed[old]}"
    return None
