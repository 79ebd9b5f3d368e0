"""Released systems' algorithms, in our words: what the fast paths are measured against.

MTLA's system: MHA, MLA, MTLA. T6's: tensor product attention. The Tensorized Transformer's: multi-linear attention,
with the causal mask that it lacks.

`of(attention)` gives the published algorithm of one of our modules, with the same weights and the same interface.
Where the release does more work than its algorithm needs and it is unclear how much, this does less: a ratio against
it is not flattered. Two things are ours: rotary pairs are half-split (a permutation, see `ops/rope.py`), and the
step counter is an integer (theirs, in the activations' dtype, sticks at 256 in bfloat16).

Shapes: B rows, N queries, S prefix positions, K = S + N keys, H heads.
"""

from ... import MHA, MLA, MTLA, TPA, AbsoluteMultiLinear, Attention, RelativeMultiLinear, TPAKVOnly
from .base import Published
from .latent import PublishedMHA, PublishedMLA, PublishedMTLA
from .multilinear import PublishedMultiLinear
from .tpa import PublishedTPA

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
    raise LookupError(f"no published algorithm of {type(attention).__name__} is kept")
