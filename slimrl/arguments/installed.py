"""Which kernel libraries of training are installed in this environment.

Promises plain booleans, looked up without importing the libraries; what follows from them is decided by functions of
these booleans in `slimrl.megatron`. Called there with the real machine, and by the rules for flags.
"""

from __future__ import annotations

import importlib.util


def transformer_engine_installed() -> bool:
    """True where Transformer Engine can be imported with its binding for torch, a package of its own.

    megatron-core counts one without the other as absent.
    """
    return all(
        importlib.util.find_spec(name) is not None for name in ("transformer_engine", "transformer_engine_torch")
    )


def apex_optimizers_installed() -> bool:
    """True where Apex's optimizers are installed."""
    return importlib.util.find_spec("apex") is not None


def apex_installed() -> bool:
    """True where Apex's kernel is installed that adds weight gradients inside the matrix product."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
