"""Forward and backward passes over micro-batches, through megatron-core's schedule.

Guarantees log-probabilities in the batch's response order and gradients divided by the global count, for every packing
and layout. Called by the trainer; a model is the list of the stages of this rank (one, or one per virtual pipeline
stage), each in its gradient-reducing wrapper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from slimrl.algorithms.log_probs import vocab_parallel_log_probs
from slimrl.arguments import Arguments
from slimrl.arguments.flags.moe import MoeArguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.data_parallel import Stage
from slimrl.megatron.model.micro_batch import MicroBatch
from slimrl.megatron.model.output_layer import TeacherStates, TeacherTop, TokensToScore
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.training.loss.loss_sums import LossSums
from slimrl.megatron.training.loss.policy_loss import PolicyLossConfig, PolicyLossInputs, policy_loss_sums
from slimrl.megatron.training.trained_model import broken_samples


@dataclasses.dataclass(frozen=True)
class LogProbConfig:
    """How hidden states become log-probabilities: with logits kept for the backward pass, or without."""

    vocab_size: int  # without padding
    temperature: float
    chunk_size: int  # rows at a time, -1 for a size that takes little memory
    keep_logits: bool
    tensor_group: dist.ProcessGroup
    context_group: dist.ProcessGroup
    distils: TeacherStates | TeacherTop | None = None  # a pass with a third column, the divergence from the teacher
    records: TeacherStates | None = None  # the teacher's pass

    @classmethod
    def from_args(cls, args: Arguments, parallel: ParallelState) -> LogProbConfig:
        """The settings of a run."""
        return cls(
            vocab_size=args.vocab_size,
            temperature=args.rollout_temperature,
            chunk_size=args.log_probs_chunk_size,
            keep_logits=args.keep_logits,
            tensor_group=parallel.tp_group,
            context_group=parallel.cp_group,
        )

    def wanted(self, micro_batch: MicroBatch) -> TokensToScore | None:
        """The model's argument: which tokens to score, None for logits."""
        if self.keep_logits:
            return None
        return TokensToScore(
            rows=micro_batch.logit_rows,
            targets=micro_batch.targets,
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
            distils=self.distils,
            records=self.records,
            key=micro_batch.rows,
            index=micro_batch.response_index[micro_batch.own] if isinstance(self.distils, TeacherTop) else None,
        )

    def __call__(self, output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, float32 [response tokens] each, from the output of the last stage.

        `output` is [2, response tokens of this rank], or the logits [1, tokens / cp, vocab / tp] if these are kept.
        Every context-parallel rank gets all response tokens of the micro-batch; only its own carry a gradient.
        """
        first, second, *_ = self.columns(output, micro_batch)
        return first, second

    def columns(self, output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """The same, and with `distils` the divergence from the teacher, from an `output` of three rows."""
        own = self._from_logits(output[0], micro_batch) if self.keep_logits else tuple(output)
        return self.of_all_ranks(micro_batch, *own)

    def of_all_ranks(self, micro_batch: MicroBatch, *columns: Tensor) -> tuple[Tensor, ...]:
        """Gather [response tokens] from the response tokens of each context-parallel rank."""
        total = micro_batch.response_index.numel()
        return gather_context_parallel(micro_batch.own, total, self.context_group, *columns)

    def index(self, micro_batch: MicroBatch) -> Tensor:
        """The places of the response tokens in the rank's columns."""
        return micro_batch.response_index

    def _from_logits(self, logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return vocab_parallel_log_probs(
            logits.index_select(0, micro_batch.logit_rows),
            micro_batch.targets,
            vocab_size=self.vocab_size,
            group=self.tensor_group,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
        )


def gather_context_parallel(own: Tensor, total: int, group: dist.ProcessGroup, *columns: Tensor) -> tuple[Tensor, ...]:
    """Columns [total] from those of each context-parallel rank of `group`; this rank has the entries at `own`."""
    if group.size() == 1:
        return columns
    gathered: tuple[Tensor, ...] = _GatherContextParallel.apply(own, total, group, *columns)
    return gathered


class _GatherContextParallel(torch.autograd.Function):
    """Columns [total] of which each rank of `group` has the values at `own`; gradients flow back only to these.

    So every rank can compute the loss of whole columns, with any function of the tokens of a sample, and the ranks'
    gradients together are its exact gradient.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, total: int, group: dist.ProcessGroup, *columns: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(own)
        ctx.set_materialize_grads(False)
        whole = columns[0].new_zeros(len(columns), total)
        whole[:, own] = torch.stack(columns)
        dist.all_reduce(whole, group=group)
        return tuple(column.clone() for column in whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return None, None, None, *(None if gradient is None else gradient[own] for gradient in gradients)


class TokenScores(Protocol):
    """How the last stage's output becomes columns: log-probabilities or values of response tokens, or rewards."""

    @property
    def context_group(self) -> dist.ProcessGroup:
        """The context-parallel ranks, each of which has a part of every sample."""
        ...

    def wanted(self, micro_batch: MicroBatch) -> Any:
        """The model's argument: which tokens to score, None for its plain output."""
        ...

    def __call__(self, output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """Float32 [entries of the micro-batch: response tokens or samples] each, differentiable in `output`."""
        ...

    def index(self, micro_batch: MicroBatch) -> Tensor:
        """The places of these entries in the rank's columns, int64."""
        ...


@dataclasses.dataclass(frozen=True)
class TrainTensors:
    """The loss's inputs except the model's output, for all samples of this rank: float32 [response tokens]."""

    old_log_probs: Tensor
    train_log_probs: Tensor
    rollout_log_probs: Tensor
    ref_log_probs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    returns: Tensor | None = None  # targets of the critic's values
    positive_weights: Tensor | None = None  # of the likelihood loss on positive examples
    weight_scales: Tensor | None = None  # 1 / the mean importance weight of the step
    values: Tensor | None = None  # the critic's, before the rollout's first optimizer step
    teacher_log_probs: Tensor | None = None  # already in the advantages; the loss does not read them

    @classmethod
    def without_policy(cls, loss_mask: Tensor, ref_log_probs: Tensor | None = None) -> TrainTensors:
        """The columns of a loss that compares with no older policy; columns that it does not read are 0."""
        none = torch.zeros_like(loss_mask)
        return cls(none, none, none, ref_log_probs, none, loss_mask)

    def inputs(
        self, micro_batch: MicroBatch, log_probs: Tensor, entropy: Tensor, *, on_policy: bool = False
    ) -> PolicyLossInputs:
        """The columns of one micro-batch with the model's output.

        With `on_policy`, `log_probs` without its gradient takes the place of the log-probabilities that training
        computes before the first optimizer step.
        """
        chosen: dict[str, Any] = {
            field.name: value if value is None else value.index_select(0, micro_batch.response_index)
            for field in dataclasses.fields(self)
            if field.name not in ("returns", "values", "teacher_log_probs")
            for value in [getattr(self, field.name)]
        }
        if on_policy:
            is_old = self.old_log_probs is self.train_log_probs
            chosen |= dict.fromkeys(("train_log_probs", *["old_log_probs"] * is_old), log_probs.detach())
        return PolicyLossInputs(
            log_probs=log_probs,
            entropy=entropy,
            response_lengths=micro_batch.response_lengths,
            lengths=micro_batch.lengths,
            **chosen,
        )

    def broken_samples(self, batch: RolloutBatch) -> list[str]:
        """The samples of `batch` with an input that is not finite (see `trained_model.broken_samples`)."""
        names = ("advantages", "rollout_log_probs", "train_log_probs", "ref_log_probs", "teacher_log_probs")
        columns = {name: value for name in names if (value := getattr(self, name)) is not None}
        return broken_samples(columns, self.loss_mask, batch.response_lengths, batch.sample_ids)


def layer_tokens(config: TransformerConfig, micro_batch: MicroBatch) -> int:
    """Tokens in a layer of this rank, with padding: megatron-core weights a layer's own loss by this number."""
    return micro_batch.tokens.numel() // (config.tensor_model_parallel_size if config.sequence_parallel else 1)


def layers_add_losses(moe: MoeArguments) -> bool:
    """Whether MoE routers add losses: load balancing or z-loss."""
    return moe.num_experts is not None and (any(moe.moe_aux_loss_coeff) or bool(moe.moe_z_loss_coeff))


def layer_tokens_by_count(
    config: TransformerConfig,
    micro_batches: Sequence[MicroBatch],
    loss_mask: Tensor,
    count: int | None,
    parallel: ParallelState,
) -> float:
    """Tokens in a layer during a step divided by the loss's divisor; collective over data-parallel ranks.

    The divisor is `count`, or the number of trained tokens if it is None. These are counted here, because a custom
    function may have changed the masks.
    """
    seen = sum(layer_tokens(config, micro_batch) for micro_batch in micro_batches)
    trained = torch.stack([loss_mask[part.response_index].count_nonzero() for part in micro_batches]).sum()
    totals = torch.stack([torch.full_like(trained, seen), trained])
    dist.all_reduce(totals, group=parallel.dp_group)
    seen, trained = totals.tolist()
    return seen / max(trained if count is None else count, 1)


def _forward(stage: Any, micro_batch: MicroBatch, settings: TokenScores) -> Tensor:
    """The last stage's output for `settings`; hidden states on other stages.

    Rotary positions restart at every sequence.
    """
    config, padding = stage.module.config, None
    if config.moe_router_enable_expert_bias:
        padding = micro_batch.padding
        if config.sequence_parallel and not stage.module.pre_process:  # the embedding's stage splits it itself
            group = stage.module.pg_collection.tp
            padding = padding.chunk(group.size(), dim=1)[group.rank()]
    wanted = settings.wanted(micro_batch)
    return stage(
        micro_batch.tokens,
        micro_batch.position_ids,
        None,
        packed_seq_params=micro_batch.sequences,
        padding_mask=padding,
        **({} if wanted is None else {"wanted": wanted}),  # a custom model may lack this parameter
        **({} if micro_batch.images is None else {"images": micro_batch.images}),
    )


def _run(
    stages: Sequence[Stage],
    micro_batches: Sequence[MicroBatch],
    forward_step: Callable[[Iterator[MicroBatch], torch.nn.Module], tuple[Tensor, Callable[..., Any]]],
    on_micro_batch: Callable[[], None],
    *,
    forward_only: bool,
) -> list[Any]:
    """The last stage's result for each micro-batch; empty on ranks of other stages."""

    def announced() -> Iterator[MicroBatch]:
        for micro_batch in micro_batches:
            on_micro_batch()
            yield micro_batch

    # Every virtual stage reads each micro-batch once; the first stage starts it.
    iterators = [announced(), *(iter(micro_batches) for _ in stages[1:])]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(stages) > 1 else iterators[0],
        model=list(stages),
        num_microbatches=len(micro_batches),
        # An upper bound: pipeline stages send each other the length of every micro-batch.
        seq_length=max(sum(micro_batch.sequences.lengths) for micro_batch in micro_batches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


@torch.no_grad()
def score_tokens(
    stages: Sequence[Stage],
    micro_batches: Sequence[MicroBatch],
    scores: TokenScores,
    entries: int,
    parallel: ParallelState,
    on_micro_batch: Callable[[], None],
    *,
    columns: int = 1,
) -> list[Tensor]:
    """The first `columns` of `scores` for all `entries` of the rank, float32 [entries] each, without gradient.

    Equal on all ranks that share these samples (all except data-parallel ranks). `on_micro_batch` is called at the
    start of each micro-batch.
    """

    def collect(micro_batch: MicroBatch, output: Tensor, non_loss_data: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        return scores.index(micro_batch), scores(output, micro_batch)

    def step(iterator: Iterator[MicroBatch], stage: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        micro_batch = next(iterator)
        return _forward(stage, micro_batch, scores), partial(collect, micro_batch)

    for stage in stages:
        stage.eval()
    pieces = _run(stages, micro_batches, step, on_micro_batch, forward_only=True)
    for stage in stages:
        stage.train()
    result = torch.zeros(columns, entries, device=parallel.device)
    for index, found in pieces:
        for row, values in zip(result, found, strict=False):
            row[index] = values
    return list(parallel.from_last_stage(result))


def forward_backward(
    stages: Sequence[Stage],
    micro_batches: Sequence[MicroBatch],
    scores: TokenScores,
    sums_of: Callable[[Tensor, MicroBatch], LossSums],
    on_micro_batch: Callable[[], None],
    *,
    by_tokens: float | None = None,
) -> list[LossSums]:
    """Accumulate the gradient of one optimizer step over its micro-batches and reduce it over ranks.

    `sums_of` computes the loss's sums from the last stage's output and its micro-batch. The gradient is divided by the
    step's `count`. If layers add losses, which megatron-core weights by their tokens, the gradient is divided by these
    tokens instead, and the loss is multiplied by `by_tokens`, the tokens divided by the count
    (`layer_tokens_by_count`).

    The sums are equal on ranks that share these samples, and empty on ranks without the last stage.
    `on_micro_batch` is called at the start of each micro-batch.
    """
    counts = scores.context_group.rank() == 0

    def loss(micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, LossSums]:
        sums = sums_of(output, micro_batch)
        value, count = sums.loss, sums.count
        if by_tokens is not None:
            value, count = by_tokens * value, torch.full_like(count, layer_tokens(stages[0].config, micro_batch))
        # megatron-core also sums counts over context-parallel ranks, and each of them has the whole count.
        count = count if counts else torch.zeros_like(count)
        # A clone, because the schedule may divide the returned loss in place, which would change a view.
        return value, count, dataclasses.replace(sums, loss=sums.loss.detach().clone())

    def step(iterator: Iterator[MicroBatch], stage: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        micro_batch = next(iterator)
        return _forward(stage, micro_batch, scores), partial(loss, micro_batch)

    return _run(stages, micro_batches, step, on_micro_batch, forward_only=False)


def policy_sums(
    columns: TrainTensors,
    scores: LogProbConfig,
    loss: PolicyLossConfig,
    on_policy: Callable[[MicroBatch, Tensor, Tensor], None] | None = None,
) -> Callable[[Tensor, MicroBatch], LossSums]:
    """`forward_backward`'s `sums_of` for the policy loss.

    `on_policy` is given if the columns lack the trainer's log-probabilities of these micro-batches: the pass's own
    values take their place, and it receives each micro-batch's log-probabilities and entropies, without gradient.
    """

    def sums_of(output: Tensor, micro_batch: MicroBatch) -> LossSums:
        log_probs, entropy, *divergence = scores.columns(output, micro_batch)
        if on_policy is not None:
            on_policy(micro_batch, log_probs.detach(), entropy.detach())
        inputs = columns.inputs(micro_batch, log_probs, entropy, on_policy=on_policy is not None)
        if divergence:
            inputs = dataclasses.replace(inputs, divergence=divergence[0])
        return policy_loss_sums(inputs, loss)

    return sums_of
