"""Flags of the optimizer and its learning rate schedule; every schedule counts optimizer steps."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class OptimizerArguments:
    """Optimizer and schedule."""

    optimizer: str = flag("adam", "optimizer (adam decouples its weight decay: AdamW)", choices=("adam", "sgd"))
    lr: float = flag(1e-6, "learning rate after warm-up", at_least=0)
    min_lr: float = flag(0.0, "learning rate at the end of the decay", at_least=0)
    lr_decay_style: str = flag(
        "linear", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = flag(
        None, "optimizer steps until --min-lr is reached (steps of the whole run)", at_least=1
    )
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up (count)", at_least=0)
    lr_warmup_fraction: float | None = flag(
        None, "warm-up as a part of --lr-decay-iters (fraction); instead of --lr-warmup-iters", at_least=0, at_most=1
    )
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up", at_least=0)
    lr_wsd_decay_iters: int | None = flag(
        None, "optimizer steps of the final decay of --lr-decay-style WSD (count, required with it)", at_least=1
    )
    lr_wsd_decay_style: str = flag(
        "exponential",
        "shape of the final decay of --lr-decay-style WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    weight_decay: float = flag(0.01, "weight decay of matrices (biases and norms have none)", at_least=0)
    start_weight_decay: float | None = flag(
        None, "weight decay at the first step, with --weight-decay-incr-style (--weight-decay)", at_least=0
    )
    end_weight_decay: float | None = flag(
        None, "weight decay at the last step, with --weight-decay-incr-style (--weight-decay)", at_least=0
    )
    weight_decay_incr_style: str = flag(
        "constant", "how the weight decay changes over the run", choices=("constant", "linear", "cosine")
    )
    adam_beta1: float = flag(0.9, "decay of Adam's first moment", at_least=0, below=1)
    adam_beta2: float = flag(0.999, "decay of Adam's second moment", at_least=0, below=1)
    adam_eps: float = flag(1e-8, "constant added to Adam's denominator", above=0)
    sgd_momentum: float = flag(0.9, "momentum of --optimizer sgd", at_least=0, below=1)
    clip_grad: float = flag(1.0, "largest norm of the whole gradient (0: no clipping)", at_least=0)
    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        "do not stop where the loss or a gradient is NaN",
        only_off=True,
        off=("--no-check-for-nan-in-loss-and-grad",),
    )
    override_opt_param_scheduler: bool = flag(False, "on resume take the schedule from the flags, not the checkpoint")
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "on resume take the schedule from the checkpoint, even where the flags say otherwise"
    )
    seed: int = flag(1234, "seed of weights, dropout and everything else drawn while training")
