"""Tensor operations of attention: fused and compiled kernels, their naive references, and the choice among them."""
