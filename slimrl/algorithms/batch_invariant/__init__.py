"""Operators whose result for a row is the same bits whatever else is computed with it.

Trainer and server use them with --true-on-policy-mode, so that both compute the same log-probability of a token.
`operators.py` has the functions on tensors, with gradients; `kernels.py` the loops behind them on a CPU, in float32;
`triton_kernels.py` the kernels on a GPU, in bfloat16.
"""
