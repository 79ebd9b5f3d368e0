"""Low-rank decompositions of stacks of matrices, in float64; they need torch alone."""

from .btd import btd, fusion_ranks, terms_from_cp
from .cp import CP, balance, cost, cp_als, cp_epc, rescale
from .fusion import constrained_fusion, fusion_penalty
from .slices import Slices
from .svd import BlockTerms, Spectrum, global_ranks, global_svd, low_rank, randomised_low_rank, spectrum, truncated_svd
from .tucker import Tucker, truncation_errors, tucker
from .weighted import orthonormal, output_errors, weight_errors, weighted_tucker

__all__ = [
    "CP",
    "BlockTerms",
    "Slices",
    "Spectrum",
    "Tucker",
    "balance",
    "btd",
    "constrained_fusion",
    "cost",
    "cp_als",
    "cp_epc",
    "fusion_penalty",
    "fusion_ranks",
    "global_ranks",
    "global_svd",
    "low_rank",
    "orthonormal",
    "output_errors",
    "randomised_low_rank",
    "rescale",
    "spectrum",
    "terms_from_cp",
    "truncated_svd",
    "truncation_errors",
    "tucker",
    "weight_errors",
    "weighted_tucker",
]
