"""Forward and backward passes over micro-batches, through megatron-core's schedule.

Promises log-probabilities in the batch's response order and gradients divided by the global count, whatever the
packing. Called by the trainer; the model is the gradient-reducing wrapper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from slimrl.algorithms.log_probs import vocab_parallel_log_probs
from slimrl.megatron.loss import PolicyLossInputs, PolicyLossSettings, PolicyLossSums, policy_loss_sums
from slimrl.megatron.micro_batch import MicroBatch


@dataclasses.dataclass(frozen=True)
class LogProbSettings:
    """How logits become log-probabilities."""

    vocab_size: int  # without padding
    temperature: float
    chunk_size: int  # rows at a time, -1 for all
    group: dist.ProcessGroup  # the tensor-parallel ranks

    def __call__(self, logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, float32 [response tokens] each, from `logits` [1, tokens, vocab / tp]."""
        return vocab_parallel_log_probs(
            logits[0].index_select(0, micro_batch.logit_rows),
            micro_batch.targets,
            vocab_size=self.vocab_size,
            group=self.group,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
        )


@dataclasses.dataclass(frozen=True)
class ResponseColumns:
    """What the loss needs beside the model's output, for all samples of this rank.

    Float32 [response tokens of the rank], but `advantages`, which is that or one value per sample.
    """

    old_log_probs: Tensor
    train_log_probs: Tensor
    rollout_log_probs: Tensor
    ref_log_probs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor

    def inputs(self, micro_batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> PolicyLossInputs:
        """The columns of one micro-batch with the model's output."""
        chosen = {
            field.name: value if value is None else value.index_select(0, micro_batch.response_index)
            for field in dataclasses.fields(self)
            for value in [getattr(self, field.name)]
        }
        return PolicyLossInputs(
            log_probs=log_probs, entropy=entropy, response_lengths=micro_batch.response_lengths, **chosen
        )


def _forward(model: torch.nn.Module, micro_batch: MicroBatch) -> Tensor:
    """Logits [1, tokens, vocab / tp]; rotary positions restart at every sequence."""
    return model(micro_batch.tokens, None, None, packed_seq_params=micro_batch.sequences)


def _run(
    model: DistributedDataParallel,
    micro_batches: Sequence[MicroBatch],
    forward_step: Callable[[Iterator[MicroBatch], torch.nn.Module], tuple[Tensor, Callable[..., Any]]],
    *,
    forward_only: bool,
) -> list[Any]:
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=[model],
        num_microbatches=len(micro_batches),
        seq_length=max(micro_batch.tokens.numel() for micro_batch in micro_batches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


@torch.no_grad()
def compute_log_probs(
    model: DistributedDataParallel,
    micro_batches: Sequence[MicroBatch],
    settings: LogProbSettings,
    response_tokens: int,
    on_micro_batch: Callable[[], None],
) -> Tensor:
    """Log-probabilities of every response token of the rank, float32 [response_tokens], without gradient.

    `on_micro_batch` is called at the begin of each.
    """

    def collect(micro_batch: MicroBatch, logits: Tensor, non_loss_data: bool) -> tuple[Tensor, Tensor]:
        return micro_batch.response_index, settings(logits, micro_batch)[0]

    def step(iterator: Iterator[MicroBatch], wrapped: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        micro_batch = next(iterator)
        on_micro_batch()
        return _forward(wrapped, micro_batch), partial(collect, micro_batch)

    model.eval()
    pieces = _run(model, micro_batches, step, forward_only=True)
    model.train()
    result = torch.zeros(response_tokens, device=micro_batches[0].tokens.device)
    for index, log_probs in pieces:
        result[index] = log_probs
    return result


def forward_backward(
    model: DistributedDataParallel,
    micro_batches: Sequence[MicroBatch],
    columns: ResponseColumns,
    log_prob_settings: LogProbSettings,
    loss_settings: PolicyLossSettings,
    on_micro_batch: Callable[[], None],
) -> list[PolicyLossSums]:
    """Accumulate the gradient of one optimizer step over its micro-batches and reduce it over ranks.

    `on_micro_batch` is called at the begin of each.
    """

    def loss(micro_batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, PolicyLossSums]:
        log_probs, entropy = log_prob_settings(logits, micro_batch)
        sums = policy_loss_sums(columns.inputs(micro_batch, log_probs, entropy), loss_settings)
        # A clone: the schedule may go on to divide the loss it is given in place, and a view would follow it.
        return sums.loss, sums.count, dataclasses.replace(sums, loss=sums.loss.detach().clone())

    def step(iterator: Iterator[MicroBatch], wrapped: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        micro_batch = next(iterator)
        on_micro_batch()
        return _forward(wrapped, micro_batch), partial(loss, micro_batch)

    return _run(model, micro_batches, step, forward_only=False)
