"""The critic of PPO: a model of the policy's sizes with a value head; the columns that it exchanges with the policy.

Before the policy's optimizer steps it gives a value for every response token of the rollout; the advantages and its own
targets, the returns, follow from these (`advantages`). Then it takes as many optimizer steps as the policy. It is in
the policy's ranks, with their process groups and micro-batches, or in ranks of its own (`critic_trainer`). Collective
over all of these ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.estimators import merged_moments
from slimrl.algorithms.losses import clipped_value_loss, masked_sum, sample_mean_weights
from slimrl.arguments import Arguments
from slimrl.arguments.checkpoints import CRITIC, Found, critic_base, critic_start, is_hf_model
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron import data_parallel
from slimrl.megatron.checkpoint import io
from slimrl.megatron.checkpoint.folder import CheckpointFolder, Retention
from slimrl.megatron.checkpoint.saver import CheckpointSaver
from slimrl.megatron.checkpoint.start import load_critic
from slimrl.megatron.checkpoint.state import load_training_state, take_snapshot
from slimrl.megatron.model.micro_batch import MicroBatch, ranges
from slimrl.megatron.model.model_builder import OF_VALUE_MODEL, build_value_stages
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.training.forward_step import (
    forward_backward,
    gather_context_parallel,
    layer_tokens_by_count,
    layers_add_losses,
    score_tokens,
)
from slimrl.megatron.training.loss.loss_sums import LossMetricNames, LossSums, reduce_sums, summed
from slimrl.megatron.training.profiling import MemoryReport
from slimrl.megatron.training.train_metrics import PhaseTimes
from slimrl.megatron.training.trained_model import TrainedModel, broken_samples, freeze_critic
from slimrl.models.adapters import AdapterConfig
from slimrl.models.model_spec import ModelSpec
from slimrl.observability.tracer import Timeline

PREFIX = "critic-"  # of its metrics, as in slime
_MOMENTS = ("value_count", "value_mean", "value_squares")
_METRICS = ("value_loss", "value_clipfrac")
_SPREAD = ("returns", "returns_squared", "errors", "errors_squared")


@dataclasses.dataclass(frozen=True)
class ValueScores:
    """The values of a micro-batch's response tokens: `TokenScores` of a `ValueModel`.

    The value of a token comes from the position before it, which has read the text up to the token and not the token:
    V(s_t) of Schulman et al. 2016, where s_t is the prompt and the response's tokens before t.
    """

    context_group: dist.ProcessGroup

    def wanted(self, micro_batch: MicroBatch) -> Tensor:
        """The positions whose values are computed, int64 [response tokens of this rank]."""
        return micro_batch.logit_rows

    def __call__(self, output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """Float32 [response tokens of the micro-batch]."""
        total = micro_batch.response_index.numel()
        return gather_context_parallel(micro_batch.own, total, self.context_group, output)

    def index(self, micro_batch: MicroBatch) -> Tensor:
        """The places of the response tokens in the rank's columns."""
        return micro_batch.response_index


@dataclasses.dataclass(frozen=True)
class ValueColumns:
    """What the value loss of a rollout reads; float32 [response tokens of the rank] each."""

    old_values: Tensor  # before the rollout's first optimizer step
    returns: Tensor
    loss_mask: Tensor

    def broken_samples(self, batch: RolloutBatch) -> list[str]:
        """The samples of `batch` with an input that is not finite (see `trained_model.broken_samples`)."""
        columns = {"values": self.old_values, "returns": self.returns}
        return broken_samples(columns, self.loss_mask, batch.response_lengths, batch.sample_ids)


VALUES = "values"


@dataclasses.dataclass(frozen=True)
class SampleColumns:
    """Float32 columns of response tokens by name, [sum(lengths)] each, between the ranks of policy and critic.

    On the host. `sample_ids` and `lengths` int64 [samples] say whose tokens they are.
    """

    sample_ids: Tensor
    lengths: Tensor
    columns: dict[str, Tensor]

    @classmethod
    def of_values(cls, batch: RolloutBatch, values: Tensor) -> SampleColumns:
        """What the policy's ranks need of the critic: the values of a batch's response tokens."""
        return cls(batch.sample_ids, batch.response_lengths, {VALUES: values.cpu()})

    @classmethod
    def of_critic(cls, batch: RolloutBatch, columns: ValueColumns) -> SampleColumns:
        """What the critic's ranks need of the policy: its targets."""
        named = {field.name: vars(columns)[field.name].cpu() for field in dataclasses.fields(columns)}
        return cls(batch.sample_ids, batch.response_lengths, named)

    @staticmethod
    def of_batch(parts: Sequence[SampleColumns], batch: RolloutBatch, device: torch.device) -> dict[str, Tensor]:
        """The columns of the samples of `batch`, in its order, from the `parts` of several data-parallel ranks.

        Raises ValueError if a sample is missing, is there twice, or has another length.
        """
        ids = torch.cat([part.sample_ids for part in parts])
        lengths = torch.cat([part.lengths for part in parts])
        columns = {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns}
        if not torch.equal(ids, batch.sample_ids):
            order = ids.argsort(stable=True)
            place = torch.searchsorted(ids[order], batch.sample_ids).clamp(max=max(len(ids) - 1, 0))
            chosen = order[place]
            starts = lengths.cumsum(0) - lengths
            if len(ids.unique()) < len(ids) or not torch.equal(ids[chosen], batch.sample_ids):
                raise ValueError("policy and critic have batches of different samples")
            index, lengths = ranges(starts[chosen], lengths[chosen]), lengths[chosen]
            columns = {name: column[index] for name, column in columns.items()}
        if not torch.equal(lengths, batch.response_lengths):
            raise ValueError("policy and critic have responses of different lengths for the same samples")
        return {name: column.to(device) for name, column in columns.items()}


class ValueScale:
    """Mean and standard deviation of all returns of a run, by which a critic's outputs are values (--normalize-values).

    Value normalization of Yu et al. 2022 (The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games),
    section 5.1: the critic is trained on `(R - mean) / std`, and `output * std + mean` is its value. The moments are of
    the trained tokens, in float64 and equal on all ranks; before the first returns they are 0 and 1. `numbers` is what
    a checkpoint saves and restores in place; it is empty without the flag.
    """

    def __init__(self, active: bool) -> None:
        self.numbers = dict.fromkeys(_MOMENTS, 0.0) if active else {}

    @property
    def mean_and_std(self) -> tuple[float, float]:
        """The std is unbiased (n - 1); 1 while it is not known or 0."""
        count, mean, squares = self.numbers.values() or (0.0, 0.0, 0.0)
        return mean, math.sqrt(squares / (count - 1)) if count > 1 and squares > 0 else 1.0

    def to_values(self, outputs: Tensor) -> Tensor:
        """The values of a critic's outputs; float32 [tokens] each."""
        mean, std = self.mean_and_std
        return outputs * std + mean if self.numbers else outputs

    def add(self, columns: ValueColumns, group: dist.ProcessGroup) -> ValueColumns:
        """Takes a rollout's returns into account; `columns` in units of the critic's outputs.

        The old values become the outputs that they came from. Collective over the data-parallel ranks in `group`.
        Returns that are not finite are left out, so that the guard of the optimizer step can report them.
        """
        if not self.numbers:
            return columns
        mean, std = self.mean_and_std
        outputs = (columns.old_values - mean) / std
        chosen = columns.returns[columns.loss_mask != 0].double()
        sums = torch.stack([chosen.new_tensor(float(chosen.numel())), chosen.sum()])
        dist.all_reduce(sums, group=group)
        own = sums[1] / sums[0].clamp(min=1)
        squares = (chosen - own).square().sum()
        dist.all_reduce(squares, group=group)
        if bool(squares.isfinite()):
            before = (self.numbers["value_count"], mean, self.numbers["value_squares"])
            moments = merged_moments(before, (float(sums[0]), float(own), float(squares)))
            self.numbers.update(zip(_MOMENTS, moments, strict=True))
        mean, std = self.mean_and_std
        return ValueColumns(outputs, (columns.returns - mean) / std, columns.loss_mask)

    def check(self, saved: dict[str, float], folder: Path, *, resumed: bool) -> None:
        """Raises ValueError if the critic in `folder`, with the numbers `saved`, was trained in other units."""
        was = set(_MOMENTS) <= saved.keys()
        if was and not self.numbers:
            raise ValueError(f"the critic in {folder} was trained with --normalize-values: add it")
        if resumed and self.numbers and not was:
            raise ValueError(f"the critic in {folder} was trained without --normalize-values: leave it out")
        self.numbers.update({name: saved[name] for name in self.numbers.keys() & saved.keys()})


@dataclasses.dataclass(frozen=True)
class ValueLossConfig:
    """The flags of the value loss."""

    value_clip: float
    per_token: bool  # mean over all tokens of the step, as the policy's loss, instead of over the samples' means

    metric_names = LossMetricNames(_METRICS, _SPREAD, ())


def value_loss_sums(
    values: Tensor, columns: ValueColumns, micro_batch: MicroBatch, settings: ValueLossConfig
) -> LossSums:
    """The clipped value loss of one micro-batch, summed as the policy's; `values` float32 [response tokens]."""
    index = micro_batch.response_index
    old_values, returns, mask = (
        column.index_select(0, index) for column in (columns.old_values, columns.returns, columns.loss_mask)
    )
    loss, clipped = clipped_value_loss(values, old_values, returns, value_clip=settings.value_clip)
    weights = mask if settings.per_token else sample_mean_weights(mask, micro_batch.response_lengths)
    trained_tokens = (mask != 0).sum()
    samples = torch.full_like(trained_tokens, micro_batch.response_lengths.numel())
    total = masked_sum(loss, weights)
    with torch.no_grad():
        errors = returns - values
        spread = {
            "returns": returns,
            "returns_squared": returns.double().square(),
            "errors": errors,
            "errors_squared": errors.double().square(),
        }
        return LossSums(
            loss=total,
            count=(trained_tokens if settings.per_token else samples).to(torch.int32),
            trained_tokens=trained_tokens.double(),
            weighted=summed({"value_loss": loss, "value_clipfrac": clipped}, weights),
            by_token=summed(spread, (mask != 0).to(mask.dtype)),
            maxima={},
        )


def explained_variance(means: dict[str, float]) -> float:
    """`1 - Var(R - V) / Var(R)` over the trained tokens; 0 if all returns are equal.

    1 for perfect values, 0 for values no better than a constant, negative for worse ones. `means` over tokens by name.
    """
    of_returns = means["returns_squared"] - means["returns"] ** 2
    of_errors = means["errors_squared"] - means["errors"] ** 2
    return 1.0 - of_errors / of_returns if of_returns > 0 else 0.0


def critic_arguments(args: Arguments) -> Arguments:
    """The flags as they apply to the critic: its own schedule and optimizer.

    Every weight of it is trained, also beside a policy of LoRA adapters, unless --critic-lora-rank gives it its own.
    """
    warmup = args.critic_lr_warmup_iters
    return dataclasses.replace(
        args,
        **args.critic_overrides,
        lr=args.critic_lr,
        lr_warmup_iters=args.lr_warmup_iters if warmup is None else warmup,
        lr_warmup_fraction=args.lr_warmup_fraction if warmup is None else None,
        lora_rank=args.critic_lora_rank,
        lora_alpha=args.critic_lora_alpha,
        **OF_VALUE_MODEL,
    )


class Critic:
    """The critic of one rank. `model` is what is trained; offloading it is the caller's."""

    def __init__(
        self,
        args: Arguments,
        parallel: ParallelState,
        resumed: CheckpointFolder | None,
        times: PhaseTimes,
        timeline: Timeline,
        *,
        own_ranks: bool = False,
    ) -> None:
        """Builds and loads the critic; `resumed` is the policy's checkpoint that this run continues.

        With `own_ranks` the random state is restored too, which is the policy's otherwise.

        Raises FileNotFoundError without weights to load, or without the critic that belongs to `resumed`.
        """
        self._parallel, self._times, self._timeline = parallel, times, timeline
        self._scores = ValueScores(parallel.cp_group)
        self._settings = ValueLossConfig(args.value_clip, args.calculate_per_token_loss)
        self._layers_add_losses = layers_add_losses(args)
        own = critic_arguments(args)
        stages = build_value_stages(own, parallel)
        start = critic_start(args, None if resumed is None else resumed.iteration)
        adapters, again = AdapterConfig.of_critic(args), resumed is not None
        base = None if adapters is None else critic_base(args)
        load_critic(ModelSpec.from_args(args), stages, parallel, start, base=base, resumed=again, seed=args.seed)
        freeze_critic(stages)
        self.model = TrainedModel.build(own, stages, parallel)
        self._scale = ValueScale(args.normalize_values)
        saved = {} if is_hf_model(start.folder) else io.read_training_metadata(start.folder).get("numbers", {})
        self._scale.check(saved, start.folder, resumed=again)
        trained = "every weight trained" if adapters is None else adapters.flags
        state = self.model.training_state(parallel, trained)
        self.state = dataclasses.replace(state, numbers=self._scale.numbers)
        if resumed is not None:
            _check_pair(resumed, start)
            found = CheckpointFolder(start.folder, start.iteration)
            random = own_ranks and not args.no_load_rng
            load_training_state(self.state, found, load_optimizer=not args.no_load_optim, load_random_state=random)
        self._with_optimizer = not args.no_save_optim
        self._root = None if args.critic_save is None else Path(args.critic_save)
        timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
        # its checkpoints are deleted with the policy's, which must never be without theirs
        self.saver = CheckpointSaver(background=args.async_save, retention=Retention(), timeout=timeout)

    def save(self, policy_root: Path, rollout_id: int, saved_with: str | None = None) -> str:
        """Writes its checkpoint into --critic-save, or beside the policy's; collective. Returns its `saved_with`.

        The policy's checkpoint of the same rollout has the same `saved_with`, a new one unless it is given, and must
        become complete after this one (`saver.finish`). Raises CheckpointError as `CheckpointSaver.save` does.
        """
        if saved_with is None:
            named: list[str] = [uuid.uuid4().hex]
            dist.broadcast_object_list(named, src=0)  # the same on all ranks, as all metadata
            (saved_with,) = named
        self.saver.save(
            self._root if self._root is not None else policy_root / CRITIC,
            rollout_id,
            lambda: take_snapshot(
                self.state, rollout_id, None, with_optimizer=self._with_optimizer, saved_with=saved_with
            ),
        )
        return saved_with

    def values(self, steps: Sequence[Sequence[MicroBatch]], batch: RolloutBatch, advance: Callable[[], None]) -> Tensor:
        """The value of every response token of the rank, float32 [response tokens], without gradient.

        `steps` are the micro-batches of each optimizer step. `advance` is called at the start of each.
        """
        everything = [micro_batch for step in steps for micro_batch in step]
        tokens = batch.loss_mask.numel()
        with self._times.phase("values"), self._timeline.span("values"):
            (values,) = score_tokens(self.model.wrapped, everything, self._scores, tokens, self._parallel, advance)
        return self._scale.to_values(values)

    def train(
        self,
        steps: Sequence[Sequence[MicroBatch]],
        columns: ValueColumns,
        batch: RolloutBatch,
        rollout_id: int,
        advance: Callable[[], None],
        memory_report: MemoryReport | None = None,
    ) -> list[dict[str, float]]:
        """Takes the optimizer steps of one rollout; metrics of each, equal on every rank.

        `memory_report` measures the steps. Raises FloatingPointError if loss or gradient is not finite (see
        `NonFiniteGuard`).
        """
        metrics = []
        columns = self._scale.add(columns, self._parallel.dp_group)
        phase, span = self._times.phase("critic_train"), self._timeline.span("critic")
        with phase, span, data_parallel.overlapped_param_gather(self.model.wrapped):
            for number, micro_batches in enumerate(steps):
                with contextlib.nullcontext() if memory_report is None else memory_report.step():
                    self.model.begin_step()
                    sums = self._accumulate(micro_batches, columns, batch.samples_per_step[number], advance)
                found = reduce_sums(sums, self._settings.metric_names, self._parallel)
                taken = {name: found[name] for name in _METRICS} | {"explained_variance": explained_variance(found)}
                where = f"rollout {rollout_id}, optimizer step {number} of the critic"
                step = self.model.step(taken["value_loss"], where, lambda: columns.broken_samples(batch))
                metrics.append({PREFIX + name: value for name, value in (taken | step).items()})
                if memory_report is not None:
                    memory_report.note(micro_batches)
        return metrics

    def _accumulate(
        self, micro_batches: Sequence[MicroBatch], columns: ValueColumns, samples: int, advance: Callable[[], None]
    ) -> list[LossSums]:
        def sums_of(output: Tensor, micro_batch: MicroBatch) -> LossSums:
            (values,) = self._scores(output, micro_batch)
            return value_loss_sums(values, columns, micro_batch, self._settings)

        weight = None
        if self._layers_add_losses:
            count = None if self._settings.per_token else samples
            config = self.model.stages[0].config
            weight = layer_tokens_by_count(config, micro_batches, columns.loss_mask, count, self._parallel)
        return forward_backward(self.model.wrapped, micro_batches, self._scores, sums_of, advance, by_tokens=weight)


def _check_pair(policy: CheckpointFolder, critic: Found) -> None:
    """Raises ValueError if the two checkpoints were not saved together: a run may have ended between the two."""
    names = [io.read_training_metadata(folder).get("saved_with") for folder in (policy.path, critic.folder)]
    if names[0] != names[1]:
        raise ValueError(
            f"{critic.folder} was not saved together with {policy.path}: resume from an earlier rollout with"
            " --ckpt-step, or start anew from the weights with --finetune"
        )
