"""Low-rank decompositions of stacks of matrices, in float64; they need torch alone."""
