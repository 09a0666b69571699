"""Builds the training batch of a rollout's scored samples: raw rewards, rewards normalized per group, training rows.

`--custom-convert-samples-to-train-data-path` returns the rows instead, as a dict of columns with one entry per row,
`--global-batch-size` x `--num-steps-per-rollout` rows in total. Required: `tokens` (ids of prompt and response),
`response_lengths` (number of response tokens), `rewards` (those trained on), `loss_masks` (0 or 1 per response token),
`rollout_log_probs` (the engine's, per response token). Optional: `raw_reward` (before normalization; default
`rewards`), `truncated` (by the length limit; default no), `sample_indices` and `rollout_ids` (ids of the sample and its
group; default the row's number), `total_lengths` (number of tokens, checked against `tokens`), `teacher_log_probs`
(per response token; required with `--opd-type sglang`), `token_rewards` (per response token, besides `rewards`).
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from slimrl.algorithms.estimators import ESTIMATORS, Baseline, Estimator, OverlongPenalty, Returns, RunningMoments
from slimrl.algorithms.returns import group_normalized_rewards
from slimrl.arguments import Arguments
from slimrl.arguments.namespace import ConversionArguments
from slimrl.data.batch_schedule import schedule_batch
from slimrl.data.routed_experts import RoutingShape
from slimrl.data.sample import Sample, SampleStatus
from slimrl.data.train_batch import RolloutBatch, batch_from_samples
from slimrl.hooks import ConvertSamples, RewardPostProcess, named, naming, resolve
from slimrl.hooks.contracts import RunArguments
from slimrl.models.model_size import active_parameters
from slimrl.models.model_spec import ModelSpec
from slimrl.rollout.dataset.images import training_inputs

_Stored = TypeVar("_Stored")


@dataclasses.dataclass(frozen=True)
class Rewards:
    """float32 [n] each, in the order of the samples."""

    raw: Tensor
    normalized: Tensor


@dataclasses.dataclass(frozen=True)
class RewardProcessing:
    """How training rewards are computed from raw rewards."""

    key: str | None  # of dict rewards
    estimator: Estimator
    normalizes: bool
    scales_by_std: bool
    over_run: bool  # normalized by the moments of all rewards of the run
    overlong: OverlongPenalty | None
    custom_path: str | None  # custom function that replaces the processing
    hook_args: RunArguments  # passed to that function

    @classmethod
    def from_args(cls, args: Arguments) -> RewardProcessing:
        """Reads the flags."""
        estimator = ESTIMATORS[args.advantage_estimator]
        return cls(
            key=args.reward_key,
            estimator=estimator,
            normalizes=args.rewards_normalization and estimator.is_group_relative,
            scales_by_std=args.grpo_std_normalization and estimator.normalizes_by_std,
            over_run=args.normalize_reward,
            overlong=OverlongPenalty.if_given(
                args.rollout_max_response_len, args.overlong_buffer_len, args.overlong_penalty_factor
            ),
            custom_path=args.custom_reward_post_process_path,
            hook_args=args,
        )


def compute_rewards(config: RewardProcessing, samples: list[Sample], moments: RunningMoments | None = None) -> Rewards:
    """Raw rewards (the `--reward-key` entry of dict rewards) and training rewards.

    Training rewards are the raw ones, with --normalize-reward normalized by `moments`, with the penalty of
    --overlong-buffer-len, normalized within groups. `moments`, those of the run, first take the raw rewards into
    account. `group_index` identifies the groups, whatever their size and position.
    `--custom-reward-post-process-path` computes both instead, without `moments`.
    Raises ValueError if a sample has no finite reward, or the custom function returns a wrong number.
    """
    if (path := config.custom_path) is not None:
        process = named("--custom-reward-post-process-path", path, RewardPostProcess)
        columns = process(config.hook_args, samples)
        raw, normalized = (torch.as_tensor(column, dtype=torch.float32) for column in columns)
        if raw.shape != (len(samples),) or normalized.shape != (len(samples),):
            raise ValueError(
                f"--custom-reward-post-process-path {path} returned rewards of shapes"
                f" {list(raw.shape)} and {list(normalized.shape)}: return two lists of {len(samples)} numbers"
            )
        _check_finite(path, samples, raw, normalized)
        return Rewards(raw, normalized)
    _check_token_rewards(config.estimator, samples)
    scored = [sample.reward_value(config.key) for sample in samples]
    raw = torch.tensor(scored, dtype=torch.float32)
    shaped = raw.clone()
    moments = RunningMoments() if moments is None else moments
    moments.add(scored)
    if config.over_run:
        shaped = torch.tensor(moments.normalized(scored), dtype=torch.float32)
    if config.overlong is not None:
        shaped += torch.tensor([config.overlong(sample.response_length) for sample in samples])
    if not config.normalizes:
        return Rewards(raw, shaped)
    group_ids = torch.tensor([sample.group_index for sample in samples], dtype=torch.int64)
    baseline = config.estimator.baseline
    weights = None
    if baseline is Baseline.LENGTH_WEIGHTED:
        weights = [0 if sample.remove_sample else sample.effective_response_length for sample in samples]
    normalized = group_normalized_rewards(
        shaped,
        group_ids,
        scale_by_std=config.scales_by_std,
        leave_one_out=baseline is Baseline.LEAVE_ONE_OUT,
        weights=None if weights is None else torch.tensor(weights),
    )
    return Rewards(raw, normalized)


def _check_token_rewards(estimator: Estimator, samples: list[Sample]) -> None:
    """Raises ValueError for rewards of tokens that no return has: of another estimator, or of a masked token."""
    for sample in samples:
        rewards = sample.column("token_rewards")
        if rewards is None:
            continue
        if estimator.returns is Returns.BROADCAST:
            raise ValueError(
                f"sample {sample.index} has token_rewards, and --advantage-estimator {estimator.name} has one reward"
                " per response: use ppo or reinforce_plus_plus, or return their sum as the reward"
            )
        mask = [1] * len(rewards) if sample.loss_mask is None else sample.loss_mask
        at = next(
            (at for at, (one, trained) in enumerate(zip(rewards, mask, strict=False)) if one and not trained), None
        )
        if at is not None:
            raise ValueError(
                f"sample {sample.index} has a token_rewards entry of {rewards[at]} at response token {at}, which is"
                " masked: give the reward to the token of the model before it"
            )


def _check_finite(path: str, samples: list[Sample], raw: Tensor, normalized: Tensor) -> None:
    for sample, *rewards in zip(samples, raw.tolist(), normalized.tolist(), strict=True):
        if not all(map(math.isfinite, rewards)):
            raise ValueError(
                f"--custom-reward-post-process-path {path} returned {' and '.join(map(str, rewards))} as rewards of"
                f" sample {sample.index}: return finite numbers"
            )


_FLAG = "--custom-convert-samples-to-train-data-path"
_NEEDED = ("tokens", "response_lengths", "rewards", "loss_masks", "rollout_log_probs")
_OTHERS = (
    "raw_reward",
    "truncated",
    "sample_indices",
    "rollout_ids",
    "total_lengths",
    "teacher_log_probs",
    "token_rewards",
    "rollout_routed_experts",
)


def remove_truncated(samples: list[Sample], *, asked: bool) -> None:
    """With --mask-truncated-samples, sets `remove_sample` of those that the length limit cut off."""
    for sample in samples if asked else ():
        sample.remove_sample = sample.remove_sample or sample.status is SampleStatus.TRUNCATED


def training_batch(
    flags: ConversionArguments,
    samples: list[Sample],
    rewards: Rewards,
    *,
    hook_args: RunArguments,
    routing: RoutingShape | None = None,
) -> RolloutBatch:
    """The rows of one rollout, without a schedule. Raises ValueError for samples or columns that cannot be trained on.

    `rewards` are those of `samples`; a custom conversion function, called with `hook_args`, returns its own.
    `routing` is the shape of the samples' routed experts.
    """
    _check_routes(samples, routing)
    path = flags.custom_convert_samples_to_train_data_path
    if path is None:
        images = training_inputs(samples, flags.vision_folder)
        return _with_teacher(flags, batch_from_samples(samples, rewards.raw, rewards.normalized, images, routing))
    function = resolve(path, ConvertSamples)
    with naming(_FLAG, path):
        return _with_teacher(flags, batch_from_columns(function(hook_args, samples), routing))


def _check_routes(samples: list[Sample], routing: RoutingShape | None) -> None:
    """Raises ValueError for routed experts that no router follows."""
    given = [sample for sample in samples if sample.rollout_routed_experts is not None]
    if given and routing is None:
        raise ValueError(
            f"sample {given[0].index} has rollout_routed_experts, which only --use-rollout-routing-replay reads: add"
            " the flag, or leave the field None"
        )


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
    """How rollouts are divided over data-parallel ranks, optimizer steps and micro-batches (`schedule_batch`)."""

    context_parallel_size: int
    micro_batch_group: int
    global_batch_size: int
    micro_batch_size: int
    max_tokens_per_micro_batch: int | None
    balance: bool
    patch_cost: float
    samples_together: int

    @classmethod
    def from_args(cls, args: Arguments) -> BatchSchedule:
        """The schedule of a run.

        A patch of an image costs the weights of the vision tower over those of the decoder that a token uses; a frozen
        one, without a backward pass, a third.
        """
        trains = args.lora_rank is None  # else adapters of the decoder alone
        tower = sum(size if trains and args.trains_weight(name) else size / 3 for name, size in args.vision_weights)
        decoder = dataclasses.replace(ModelSpec.from_args(args), vision_weights=()) if tower else None
        return cls(
            context_parallel_size=args.context_parallel_size,
            micro_batch_group=args.microbatch_group_size_per_vp_stage or 1,
            global_batch_size=args.global_batch_size,
            micro_batch_size=args.micro_batch_size,
            max_tokens_per_micro_batch=args.max_tokens_per_gpu if args.use_dynamic_batch_size else None,
            balance=args.balance_data,
            patch_cost=0.0 if decoder is None else tower / active_parameters(decoder),
            samples_together=args.samples_together,
        )

    def divide(self, batch: RolloutBatch, data_parallel_size: int) -> list[RolloutBatch]:
        """The parts of a batch of `training_batch`, one per data-parallel rank."""
        return schedule_batch(batch, data_parallel_size=data_parallel_size, **vars(self))

    def stored(
        self, batch: RolloutBatch, data_parallel_sizes: Sequence[int], put: Callable[[bytes], _Stored]
    ) -> list[list[_Stored]]:
        """The results of `put` for the pickled parts of each size; equal sizes have the same ones."""
        by_size = {
            size: [put(pickle.dumps(part, protocol=5)) for part in self.divide(batch, size)]
            for size in dict.fromkeys(data_parallel_sizes)
        }
        return [by_size[size] for size in data_parallel_sizes]


def _with_teacher(flags: ConversionArguments, batch: RolloutBatch) -> RolloutBatch:
    """The batch, if it has the teacher's log-probabilities exactly where training reads them; else ValueError."""
    given, needs_top = batch.teacher_log_probs is not None, flags.has_divergence and flags.has_served_teacher
    if needs_top and (batch.teacher_top_ids is None or batch.teacher_top_log_probs is None) and batch.loss_mask.numel():
        raise ValueError(
            "no sample has teacher_top_ids and teacher_top_log_probs, which --opd-divergence with --opd-type sglang"
            " trains on: give --rm-model or --rm-url, or set them in a custom function"
        )
    if flags.has_served_teacher and not given and batch.loss_mask.numel():
        raise ValueError(
            "no sample has teacher_log_probs, which --use-opd --opd-type sglang trains on: give --rm-model or --rm-url,"
            " or set them in a custom function"
        )
    if given and not flags.has_served_teacher:
        raise ValueError(
            "the samples have teacher_log_probs, which only --use-opd --opd-type sglang reads: add these flags, or"
            " leave the values None"
        )
    return batch


def batch_from_columns(columns: Any, routing: RoutingShape | None = None) -> RolloutBatch:
    """The batch from custom columns. Raises ValueError with the column that is missing, unknown or does not fit."""
    if not isinstance(columns, dict):
        raise ValueError(f"the function returned {type(columns).__name__}: return a dict of columns")
    missing = [name for name in _NEEDED if name not in columns]
    unknown = sorted(set(columns) - {*_NEEDED, *_OTHERS})
    if missing or unknown:
        raise ValueError(f"columns {missing} are missing and {unknown} unknown: see slimrl.rollout.convert_samples")
    count = len(columns["tokens"])
    for name, column in columns.items():
        if len(column) != count:
            raise ValueError(f"column {name} has {len(column)} entries but tokens has {count}: give one for each row")
    rows = [
        Sample(
            prompt="",
            index=int(columns.get("sample_indices", range(count))[row]),
            group_index=int(columns.get("rollout_ids", range(count))[row]),
            tokens=list(columns["tokens"][row]),
            response_length=int(columns["response_lengths"][row]),
            loss_mask=list(columns["loss_masks"][row]),
            rollout_log_probs=list(columns["rollout_log_probs"][row]),
            teacher_log_probs=list(columns["teacher_log_probs"][row]) if "teacher_log_probs" in columns else None,
            token_rewards=list(columns["token_rewards"][row]) if "token_rewards" in columns else None,
            rollout_routed_experts=columns.get("rollout_routed_experts", [None] * count)[row],
            status=_status(columns, row),
        )
        for row in range(count)
    ]
    for row, total in zip(rows, columns.get("total_lengths", [len(row.tokens) for row in rows]), strict=True):
        if int(total) != len(row.tokens):
            raise ValueError(f"sample {row.index} has {len(row.tokens)} tokens but total_lengths {total}")
    rewards = torch.as_tensor(columns["rewards"], dtype=torch.float32)
    raw = torch.as_tensor(columns.get("raw_reward", columns["rewards"]), dtype=torch.float32)
    return batch_from_samples(rows, raw, rewards, routing=routing)


def _status(columns: dict[str, Any], row: int) -> SampleStatus:
    return SampleStatus.TRUNCATED if "truncated" in columns and columns["truncated"][row] else SampleStatus.COMPLETED
