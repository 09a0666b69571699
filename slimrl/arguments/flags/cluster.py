"""Flags of GPUs and placement. On a machine without GPUs they count logical GPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class ClusterArguments:
    """GPUs, placement and process groups."""

    actor_num_nodes: int = flag(1, "training nodes (count)", at_least=1)
    actor_num_gpus_per_node: int = flag(
        8, "training GPUs on each of these nodes (count); the training world size is nodes x this", at_least=1
    )
    rollout_num_gpus: int = flag(
        None,
        "GPUs of all inference engines together (count; with --colocate the training GPUs, else required)",
        at_least=1,
    )
    rollout_num_gpus_per_engine: int = flag(
        1, "GPUs of one SGLang engine: its tensor parallel size x --sglang-pp-size (count)", at_least=1
    )
    num_gpus_per_node: int = flag(8, "GPUs per node (count); an engine that needs more takes whole nodes", at_least=1)
    colocate: bool = flag(False, "train and generate on the same GPUs (on separate GPUs)")
    offload: bool = flag(False, "short for --offload-train --offload-rollout")
    offload_train: bool | None = flag(
        None,
        "offload the training state to host memory during generation (on with --colocate)",
        off=("--no-offload-train",),
    )
    offload_train_nccl: bool = flag(
        True,
        "keep NCCL's buffers on the device while training is offloaded, and set NCCL_CUMEM_ENABLE=0 unless it is set:"
        " for machines where NCCL hangs with cuMem (GPUs on PCIe, NVIDIA/nccl#2379)",
        negated=True,
        off=("--no-offload-train-nccl",),
    )
    offload_rollout: bool | None = flag(
        None, "release the engines' memory during training (on with --colocate)", off=("--no-offload-rollout",)
    )
    distributed_backend: str | None = flag(
        None,
        "torch.distributed backend of the training processes (nccl on GPUs, gloo on CPU)",
        choices=("nccl", "gloo"),
        not_served="the backend follows from the machine; leave it out",
    )
    distributed_timeout_minutes: int = flag(10, "timeout of one training collective (minutes)", at_least=1)
    watchdog_report_seconds: float = flag(
        300.0,
        "after a wait of this length log what the driver waits for and where each process is; again each time the wait"
        " has doubled (seconds; 0: never)",
        at_least=0,
    )
    watchdog_limit_seconds: float | None = flag(
        None, "end the run with that report after a single wait of this length (seconds; never)", above=0
    )
    train_backend: str = flag("megatron", "training backend", choices=("megatron",))
    release_train: bool = flag(
        False,
        "end the training processes during generation, and restart them from a checkpoint",
        not_served="training processes stay; use --offload-train, which offloads them from the device",
    )
    custom_megatron_init_path: str | None = flag(
        None,
        "function that runs on every training rank after Megatron's initialisation (dotted import path)",
    )
    train_env_vars: dict[str, Any] = flag(
        {}, "environment variables of training processes, not of engines (JSON object)"
    )

    @property
    def actor_num_gpus(self) -> int:
        """GPUs of the whole training group."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node
