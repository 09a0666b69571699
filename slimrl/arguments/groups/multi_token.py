"""Flags of multi-token prediction layers (MTP)."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag

_MTP = "next-token layers are kept as they are in the checkpoint and not trained in this version; leave it out"


@dataclasses.dataclass
class MultiTokenArguments:
    """Multi-token prediction."""

    mtp_num_layers: int | None = flag(None, "layers that predict further tokens (count; none)", not_served=_MTP)
    mtp_loss_scaling_factor: float = flag(0.2, "weight of their loss", at_least=0, not_served=_MTP)
    enable_mtp_training: bool = flag(False, "train those layers", not_served=_MTP)
