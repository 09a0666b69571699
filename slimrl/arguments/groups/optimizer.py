"""Flags of the optimizer and its learning rate schedule; every schedule counts optimizer steps."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class OptimizerArguments:
    """Optimizer and schedule."""

    optimizer: str = flag("adam", "optimizer (adam decouples its weight decay: AdamW)", choices=("adam",))
    lr: float = flag(1e-6, "learning rate after warm-up", at_least=0)
    min_lr: float = flag(0.0, "learning rate at the end of the decay", at_least=0)
    lr_decay_style: str = flag(
        "linear", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root")
    )
    lr_decay_iters: int | None = flag(
        None, "optimizer steps until --min-lr is reached (steps of the whole run)", at_least=1
    )
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up (count)", at_least=0)
    lr_warmup_fraction: float | None = flag(
        None, "warm-up as a part of --lr-decay-iters (fraction); instead of --lr-warmup-iters", at_least=0, at_most=1
    )
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up", at_least=0)
    weight_decay: float = flag(0.01, "weight decay of matrices (biases and norms have none)", at_least=0)
    adam_beta1: float = flag(0.9, "decay of Adam's first moment", at_least=0, below=1)
    adam_beta2: float = flag(0.999, "decay of Adam's second moment", at_least=0, below=1)
    adam_eps: float = flag(1e-8, "constant added to Adam's denominator", above=0)
    clip_grad: float = flag(1.0, "largest norm of the whole gradient (0: no clipping)", at_least=0)
    seed: int = flag(1234, "seed of weights, dropout and everything else drawn while training")
