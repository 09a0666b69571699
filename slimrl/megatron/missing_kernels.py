"""What is slower on a GPU where Transformer Engine's layers are not used, said once when training starts.

The text is a function of described facts; the trainer looks for the packages on rank 0.
"""

from __future__ import annotations

import logging

import torch

from slimrl.arguments import Arguments
from slimrl.arguments.installed import apex_optimizers_installed, transformer_engine_installed

logger = logging.getLogger(__name__)


def slower_on_gpu(args: Arguments, *, cuda: bool, transformer_engine: bool, apex: bool) -> str | None:
    """One sentence for the log: what runs in slower kernels and what mends it; None where nothing does.

    `cuda` says whether training runs on a GPU, the other two which packages are installed.
    """
    if not cuda or (transformer_engine and args.transformer_impl != "local"):
        return None
    slower = ["attention, norms and rotary positions run in separate kernels"]
    if args.num_experts is not None:
        slower.append("the experts of a rank run one after another")
    if args.optimizer == "adam" and not (transformer_engine or apex):
        slower.append("AdamW is torch's own, in several kernels")
    if transformer_engine:
        reason, mend = "--transformer-impl local is given", "leave the flag out"
    else:
        reason = "Transformer Engine or its binding (transformer-engine-torch) is not installed"
        mend = "install it as docs/install.md says"
    return f"training on a GPU is slower than it can be, because {reason}: {', '.join(slower)}; {mend}"


def warn(args: Arguments, device: torch.device) -> None:
    """Log that sentence for a trainer on `device`."""
    engine, apex = transformer_engine_installed(), apex_optimizers_installed()
    sentence = slower_on_gpu(args, cuda=device.type == "cuda", transformer_engine=engine, apex=apex)
    if sentence is not None:
        logger.warning("%s", sentence)
