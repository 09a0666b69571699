"""Flags that say how many GPUs each side gets. On a machine without GPUs they are logical GPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class ClusterArguments:
    """GPUs, placement and process groups."""

    actor_num_nodes: int = flag(1, "nodes given to training (count)", at_least=1)
    actor_num_gpus_per_node: int = flag(
        8, "GPUs used for training on each of those nodes (count); the training world size is nodes x this", at_least=1
    )
    rollout_num_gpus: int = flag(
        None,
        "GPUs for all inference engines together (count; with --colocate the training GPUs, else required)",
        at_least=1,
    )
    rollout_num_gpus_per_engine: int = flag(
        1, "GPUs of one SGLang engine: its tensor parallel size x --sglang-pp-size (count)", at_least=1
    )
    num_gpus_per_node: int = flag(8, "GPUs a node has (count); an engine that needs more takes whole nodes", at_least=1)
    colocate: bool = flag(False, "train and generate on the same GPUs; without it each side has its own")
    offload: bool = flag(False, "short for --offload-train --offload-rollout")
    offload_train: bool | None = flag(
        None,
        "park the training state in host memory while generating (on with --colocate)",
        off=("--no-offload-train",),
    )
    offload_train_nccl: bool = flag(
        True,
        "keep NCCL's buffers on the device while training is offloaded, and have NCCL_CUMEM_ENABLE=0 where nothing sets"
        " it: for machines where NCCL hangs with cuMem (GPUs on PCIe, NVIDIA/nccl#2379)",
        negated=True,
        off=("--no-offload-train-nccl",),
    )
    offload_rollout: bool | None = flag(
        None, "release the engines' memory while training (on with --colocate)", off=("--no-offload-rollout",)
    )
    distributed_backend: str | None = flag(
        None,
        "torch.distributed backend of the training processes (nccl on GPUs, gloo on CPU)",
        choices=("nccl", "gloo"),
        not_served="the backend follows from the machine; leave it out",
    )
    distributed_timeout_minutes: int = flag(10, "longest wait of one training collective (minutes)", at_least=1)
    watchdog_report_seconds: float = flag(
        300.0,
        "after waiting this long say what is awaited, by whom and where each stands; again after twice as long, and"
        " so on (seconds; 0: never)",
        at_least=0,
    )
    watchdog_limit_seconds: float | None = flag(
        None, "after waiting this long for any one thing end the run, with that report (seconds; never)", above=0
    )
    train_backend: str = flag("megatron", "what trains", choices=("megatron",))
    release_train: bool = flag(
        False,
        "end the training processes while generating, and start them again from a checkpoint",
        not_served="the training processes stay; give --offload-train, which takes them off the device",
    )
    custom_megatron_init_path: str | None = flag(
        None,
        "function that runs on every training rank after Megatron's initialisation (dotted import path)",
    )
    train_env_vars: dict[str, Any] = flag(
        {}, "environment variables of the training processes, not of engines (JSON object)"
    )

    @property
    def actor_num_gpus(self) -> int:
        """GPUs of the whole training group."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node
