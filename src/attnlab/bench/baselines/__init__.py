"""Algorithms of released systems, reimplemented as baselines of mode=bench.

They are MHA, MLA and MTLA of the MTLA system, tensor product attention of T6, and multi-linear attention of the
Tensorized Transformer, with a causal mask added.

`of(attention)` returns the published algorithm of a module of attnlab, with the same weights and the same interface.
The baselines omit work of a release that does not belong to its algorithm, so that ratios do not favour attnlab. They
differ from the releases in two points: rotary pairs are half-split, which is a permutation (see
`attention/ops/rope.py`), and the step counter is an integer, because it would not exceed 256 in bfloat16.

Shapes: B rows, N queries, S prefix positions, K = S + N keys, H heads.
"""

from attnlab.attention import MHA, MLA, MTLA, TPA, AbsoluteMultiLinear, Attention, RelativeMultiLinear, TPAKVOnly
from attnlab.bench.baselines.base import Published
from attnlab.bench.baselines.latent import PublishedMHA, PublishedMLA, PublishedMTLA
from attnlab.bench.baselines.tensors import PublishedMultiLinear, PublishedTPA

FORMS: dict[type[Attention], type[Published]] = {
    MTLA: PublishedMTLA,
    MLA: PublishedMLA,
    MHA: PublishedMHA,
    TPA: PublishedTPA,
    TPAKVOnly: PublishedTPA,
    AbsoluteMultiLinear: PublishedMultiLinear,
    RelativeMultiLinear: PublishedMultiLinear,
}


def of(attention: Attention) -> Published:
    """The published algorithm with the weights of `attention`. LookupError: there is none."""
    if type(attention) in FORMS:
        return FORMS[type(attention)](attention)
    raise LookupError(f"there is no published algorithm of {type(attention).__name__}")
