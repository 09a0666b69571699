"""The columnar unit of rollout data: one tensor per field, samples laid end to end."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass
class RolloutBatch:
    """`n` samples as columns; what one data-parallel rank trains on for one rollout.

    `tokens` holds every sample's prompt and response end to end; response columns (`loss_mask`,
    `rollout_log_probs`) hold the responses only. The schedule columns say how the samples are cut
    into optimizer steps and micro-batches; the per-step counts are global over data-parallel ranks.
    """

    tokens: Tensor  # int64 [sum(total_lengths)]
    total_lengths: Tensor  # int64 [n], prompt + response
    response_lengths: Tensor  # int64 [n]
    loss_mask: Tensor  # float32 [sum(response_lengths)], 1 where the token is trained on
    rollout_log_probs: Tensor  # float32 [sum(response_lengths)], from the rollout engine
    raw_rewards: Tensor  # float32 [n], as the reward function gave them
    rewards: Tensor  # float32 [n], after the group's normalisation
    group_ids: Tensor  # int64 [n], samples of one prompt share it
    sample_ids: Tensor  # int64 [n], unique over the run
    truncated: Tensor  # bool [n]
    micro_batches: list[list[list[int]]] = dataclasses.field(default_factory=list)  # [step][micro-batch] -> rows
    samples_per_step: list[int] = dataclasses.field(default_factory=list)  # global
    tokens_per_step: list[int] = dataclasses.field(default_factory=list)  # trained tokens, global

    def __len__(self) -> int:
        return self.total_lengths.numel()
