"""Flags of the way that new weights take from training to the engines."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class WeightUpdateArguments:
    """Weight updates."""

    update_weights_interval: int = flag(
        1, "train_async.py: push weights after every that many rollouts (count)", at_least=1
    )
    update_weight_buffer_size: int = flag(512 * 1024**2, "size of one bucket of weights on its way (bytes)", at_least=1)
    update_weight_transport: str = flag(
        "nccl",
        "nccl: process group broadcast (gloo on CPU), shared tensors with --colocate; disk: files",
        choices=("nccl", "disk"),
    )
    update_weight_disk_dir: str | None = flag(
        None, "folder for --update-weight-transport disk, seen by training and engines (path)"
    )
    check_weight_update_equal: bool = flag(
        False, "after the first push compare every engine's weights with the trained ones, and stop where they differ"
    )
