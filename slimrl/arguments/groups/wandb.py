"""Flags of Weights & Biases and of further statistics."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class WandbArguments:
    """Weights & Biases, and statistics on demand."""

    use_wandb: bool = flag(False, "log to Weights & Biases")
    wandb_mode: str | None = flag(
        None,
        "send (online), keep for `wandb sync` (offline), or start nothing (disabled) (WANDB_MODE, else online)",
        choices=("online", "offline", "disabled"),
    )
    wandb_dir: str | None = flag(None, "folder below which its files lie in wandb/ (path; the run folder)")
    wandb_key: str | None = flag(
        None, "key to log in with; shown nowhere, but better given as WANDB_API_KEY (that, or what wandb login stored)"
    )
    wandb_host: str | None = flag(None, "address of the service (URL; WANDB_BASE_URL, else https://api.wandb.ai)")
    wandb_team: str | None = flag(None, "team (entity) (your own)")
    wandb_group: str | None = flag(None, "group of runs, and name of the run (the name is that of the run folder)")
    wandb_project: str | None = flag(None, "project of the run (slimrl)")
    wandb_run_id: str | None = flag(
        None, "run to continue (a resumed run continues the one that its folder's summary names; else a new one)"
    )
    wandb_random_suffix: bool = flag(
        True, "do not append the run's id to the group", only_off=True, off=("--disable-wandb-random-suffix",)
    )
    wandb_always_use_train_step: bool = flag(
        False, "optimizer steps on every horizontal axis, of TensorBoard too, instead of rollouts"
    )
    log_multi_turn: bool = flag(False, "statistics of turns (multi_turn/)")
    log_passrate: bool = flag(False, "pass@k of each rollout (passrate/)")
    log_reward_category: str | None = flag(
        None, "entry of a reward dict: the share of samples by its value is logged (rollout/error_cat/)"
    )
    log_correct_samples: bool = flag(False, "lengths and entropy of the samples with reward 1 or more")
