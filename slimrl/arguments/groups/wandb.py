"""Flags of Weights & Biases and of further statistics."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag

_WANDB = "use --use-tensorboard; every number is in summary.json of the run folder too"
_STATISTICS = "it is not computed in this version; dump samples with --save-debug-rollout-data"


@dataclasses.dataclass
class WandbArguments:
    """Weights & Biases."""

    use_wandb: bool = flag(False, "log to Weights & Biases", not_served=_WANDB)
    wandb_mode: str | None = flag(
        None, "online, offline or not at all", choices=("online", "offline", "disabled"), not_served=_WANDB
    )
    wandb_dir: str | None = flag(None, "folder of its files", not_served=_WANDB)
    wandb_key: str | None = flag(None, "key to log in with", not_served=_WANDB)
    wandb_host: str | None = flag(None, "address of the service", not_served=_WANDB)
    wandb_team: str | None = flag(None, "team (entity)", not_served=_WANDB)
    wandb_group: str | None = flag(None, "group of runs", not_served=_WANDB)
    wandb_project: str | None = flag(None, "project of the run", not_served=_WANDB)
    wandb_run_id: str | None = flag(None, "run to continue", not_served=_WANDB)
    wandb_random_suffix: bool = flag(
        True, "no random suffix", only_off=True, off=("--disable-wandb-random-suffix",), not_served=_WANDB
    )
    wandb_always_use_train_step: bool = flag(False, "optimizer steps on every axis", not_served=_WANDB)
    log_multi_turn: bool = flag(False, "statistics of turns", not_served=_STATISTICS)
    log_passrate: bool = flag(False, "pass@k of each rollout", not_served=_STATISTICS)
    log_reward_category: str | None = flag(
        None, "entry of a reward dict whose values are counted", not_served=_STATISTICS
    )
    log_correct_samples: bool = flag(False, "statistics of correct samples", not_served=_STATISTICS)
