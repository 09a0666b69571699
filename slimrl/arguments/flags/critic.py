"""Flags of the critic of --advantage-estimator ppo: advantages, value loss, its weights and schedule."""

from __future__ import annotations

import dataclasses

from slimrl.algorithms.estimators import ESTIMATORS
from slimrl.arguments.flag import flag

WITH_CRITIC = tuple(name for name, row in ESTIMATORS.items() if row.has_critic)


@dataclasses.dataclass
class CriticArguments:
    """The critic (with --advantage-estimator ppo).

    It is a model of the policy's sizes with a value head, trained by the policy's GPUs. Flags that are not here apply
    to both.
    """

    value_clip: float = flag(0.2, "clip of the value loss: the distance from the value before the rollout", at_least=0)
    num_critic_only_steps: int = flag(0, "rollouts at the start that train the critic only (count)", at_least=0)
    critic_lr: float = flag(None, "learning rate of the critic after warm-up (--lr)", at_least=0)
    critic_lr_warmup_iters: int = flag(
        None, "optimizer steps of the critic's linear warm-up (as the policy's)", at_least=0
    )
    critic_load: str | None = flag(
        None,
        "folder of the critic's weights: a critic's checkpoint, or a model (torch_dist or Hugging Face), whose head is"
        " then new (path; on resuming --critic-save, at the start --ref-load or --load)",
    )
    critic_save: str | None = flag(
        None, "folder for the critic's checkpoints, written at each of --save (path; the folder critic in --save)"
    )
    critic_num_nodes: int | None = flag(
        None,
        "nodes of the critic (those of the policy)",
        at_least=1,
        not_served="the critic trains on the policy's GPUs; leave it out",
    )
    critic_num_gpus_per_node: int | None = flag(
        None,
        "GPUs of the critic on each node (those of the policy)",
        at_least=1,
        not_served="the critic trains on the policy's GPUs; leave it out",
    )
