"""Operators whose result for a row is the same bits whatever else is computed with it, in float32 on a CPU.

Trainer and server use them with --true-on-policy-mode, so that both compute the same log-probability of a token.
`kernels.py` has the loops, `operators.py` the functions on tensors, with gradients.
"""
