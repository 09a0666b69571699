"""Flags of loading and saving checkpoints."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class CheckpointArguments:
    """Loading and saving."""

    hf_checkpoint: str = flag(
        None, "Hugging Face model folder: tokenizer, config.json and the engines' initial weights (path, required)"
    )
    ref_load: str | None = flag(
        None,
        "torch_dist or Hugging Face folder of the reference model; also the initial weights if --load has none (path)",
    )
    ref_ckpt_step: int | None = flag(
        None, "iteration to load from --ref-load (the one in its tracker file)", at_least=0
    )
    load: str | None = flag(
        None,
        "torch_dist folder to resume from (path); absent or empty: a fresh start from --ref-load; a Hugging Face"
        " folder: a fresh start from it",
    )
    ckpt_step: int | None = flag(None, "iteration to load from --load (the one in its tracker file)", at_least=0)
    no_load_optim: bool = flag(False, "do not load the optimizer state")
    no_load_rng: bool = flag(False, "do not load the random number generators' state")
    finetune: bool = flag(False, "load weights only: no optimizer, no random state, count from rollout 0")
    save: str | None = flag(None, "folder for torch_dist checkpoints (path)")
    save_interval: int | None = flag(
        None, "save every N rollouts, and after the last (only after the last)", at_least=1
    )
    no_save_optim: bool = flag(False, "leave the optimizer state out of checkpoints")
    no_save_rng: bool = flag(
        False,
        "leave the random number generators' state out of checkpoints",
        not_served="these few kilobytes are always saved; use --no-load-rng to ignore them",
    )
    async_save: bool = flag(
        False, "write checkpoints while training continues, from a copy of the state in host memory"
    )
    save_hf: str | None = flag(None, "also export each checkpoint as a Hugging Face folder (path with {rollout_id})")
    save_retain_interval: int | None = flag(
        None,
        "keep the checkpoints after every N rollouts, and of the others the newest (all)",
        at_least=1,
    )
    save_total_limit: int | None = flag(
        None,
        "keep the newest N checkpoints, in addition to those of --save-retain-interval (all; with that flag, one)",
        at_least=1,
    )
    ckpt_format: str = flag(
        "torch_dist",
        "format of checkpoints",
        choices=("torch_dist", "torch", "zarr", "torch_dcp", "fsdp_dtensor"),
        not_served="torch_dist is the only format; leave it out",
    )
    dist_ckpt_optim_fully_reshardable: bool = flag(False, "save optimizer state that any layout can load (always on)")
