"""The algorithms of released systems, rewritten: the baselines of mode=bench.

MTLA's system: MHA, MLA, MTLA. T6's: tensor product attention. The Tensorized Transformer's: multi-linear attention,
with the causal mask that it lacks.

`of(attention)` gives the published algorithm of a module of attnlab, with the same weights and the same interface.
Where a release does unclear amounts of work beyond its algorithm, the baseline does less, so that ratios do not
flatter attnlab. Two things differ from the releases: rotary pairs are half-split (a permutation, see
`attention/ops/rope.py`), and the step counter is an integer (in the activations' dtype it sticks at 256 in bfloat16).

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
    """The published algorithm with `attention`'s weights. LookupError: there is none."""
    if type(attention) in FORMS:
        return FORMS[type(attention)](attention)
    raise LookupError(f"there is no published algorithm of {type(attention).__name__}")
