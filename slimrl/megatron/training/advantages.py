"""Advantages and the other per-token columns of training, and the custom functions that may change them.

Between the log-probability passes and the first optimizer step, a rank's part of a rollout becomes the dict that custom
functions receive (`slimrl.hooks.contracts`), and then columns again. The changed dict is checked against the
samples; an error in a function names its flag.

docs/hooks.md lists when each is called. Custom losses are in `step_loss`, custom corrections and reducers in `loss`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.estimators import ESTIMATORS, Returns
from slimrl.algorithms.losses import TeacherTerm, kl_estimate, sums_per_sample
from slimrl.algorithms.off_policy import ImportanceWeighting, weight_totals
from slimrl.algorithms.returns import (
    discounted_returns,
    generalized_advantages,
    length_adaptive_lambda,
    reward_at_last_token,
)
from slimrl.arguments.flags.algorithm import AlgorithmArguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.hooks import BeforeLogProb, BeforeTrainStep, CustomAdvantage, Hook, HookFailedError, MegatronInit, named
from slimrl.hooks import RolloutDataPostprocess as Postprocess
from slimrl.hooks.contracts import RunArguments
from slimrl.megatron.training.forward_step import TrainTensors
from slimrl.megatron.training.loss.policy_loss import importance_weighting


def token_advantages(
    algorithm: AlgorithmArguments,
    batch: RolloutBatch,
    log_probs: Tensor,
    ref_log_probs: Tensor | None,
    values: Tensor | None,
    group: dist.ProcessGroup,
    penalty: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and `token_returns`; both float32 [response tokens of the rank].

    `penalty` [response tokens] is subtracted from the advantages. With --normalize-advantages the advantages are
    whitened over the trained tokens of all data-parallel ranks, which `group` contains. `values` are the critic's, of
    an estimator that has one; without one, the advantages are the returns, less the penalty.
    """
    advantages, returns = token_returns(algorithm, batch, log_probs, ref_log_probs, values)
    advantages = advantages if penalty is None else advantages - penalty
    if algorithm.normalize_advantages:
        advantages = whitened(advantages, batch.loss_mask.to(advantages.device), group)
    return advantages, returns


def token_returns(
    algorithm: AlgorithmArguments,
    batch: RolloutBatch,
    log_probs: Tensor,
    ref_log_probs: Tensor | None,
    values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages before whitening, and returns: [response tokens of the rank]; rewards are already normalised by group.

    - `Returns.GENERALIZED` (PPO): generalised advantages of the rewards that follow, and the targets of the critic,
      which are those of --critic-lambd if it is given (VC-PPO: Yuan et al. 2025, arXiv:2503.01491, section 3.2). With
      --length-adaptive-gae-alpha the lambda of the advantages alone depends on a response's trained tokens.
    - `Returns.DISCOUNTED` (REINFORCE++, Hu 2025, equations 3 and 4): the discounted return of the reward at the last
      trained token and of -kl_coef * KL_t at every trained token.
    - `Returns.BROADCAST`: the sample's reward - kl_coef * KL_t.

    The first two add `token_rewards` of the batch at their trained tokens.
    """
    device = log_probs.device
    lengths, mask = batch.response_lengths.to(device), batch.loss_mask.to(device)
    penalty = torch.zeros_like(log_probs)
    if algorithm.kl_coef != 0.0 and ref_log_probs is not None:
        penalty = algorithm.kl_coef * kl_estimate(log_probs, ref_log_probs, algorithm.kl_loss_type)
    kind = ESTIMATORS[algorithm.advantage_estimator].returns
    if batch.token_rewards is not None:
        if kind is Returns.BROADCAST:
            raise ValueError(f"token_rewards have no place in --advantage-estimator {algorithm.advantage_estimator}")
        penalty = penalty - batch.token_rewards.to(device)  # both are of tokens, with opposite signs
    if kind is Returns.BROADCAST:
        returns = torch.repeat_interleave(batch.rewards.to(device), lengths) - penalty
        return returns, returns
    rewards = reward_at_last_token(batch.rewards.to(device), mask, lengths) - penalty.masked_fill(mask == 0, 0.0)
    if kind is Returns.DISCOUNTED:
        returns = discounted_returns(rewards, lengths, algorithm.gamma)
        return returns, returns
    if values is None:
        raise ValueError(f"--advantage-estimator {algorithm.advantage_estimator} needs the values of a critic")
    columns, gamma, alpha = (rewards, values, mask, lengths), algorithm.gamma, algorithm.length_adaptive_gae_alpha
    of_critic = algorithm.lambd if algorithm.critic_lambd is None else algorithm.critic_lambd
    lambd: float | Tensor = algorithm.lambd
    if alpha is not None:
        lambd = length_adaptive_lambda(sums_per_sample((mask != 0).double(), lengths), alpha)
    advantages, targets = generalized_advantages(*columns, gamma=gamma, lambd=lambd)
    if alpha is not None or of_critic != algorithm.lambd:
        _, targets = generalized_advantages(*columns, gamma=gamma, lambd=of_critic)
    return advantages, targets


def whitened(values: Tensor, mask: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(values - mean) / (std + 1e-8) with mean and unbiased std over the unmasked values of all ranks."""
    trained = mask != 0
    chosen = values[trained].double()
    moments = torch.stack([chosen.new_tensor(float(chosen.numel())), chosen.sum()])
    dist.all_reduce(moments, group=group)
    count, total = moments
    mean = total / count.clamp(min=1)
    squares = (chosen - mean).square().sum()
    dist.all_reduce(squares, group=group)
    deviation = (squares / (count - 1).clamp(min=1)).sqrt()
    return ((values.double() - mean) / (deviation + 1e-8)).to(values.dtype)


_INIT = "--custom-megatron-init-path"
_BEFORE_LOG_PROB = "--custom-megatron-before-log-prob-hook-path"
_BEFORE_STEP = "--custom-megatron-before-train-step-hook-path"
ADVANTAGE = "--custom-advantage-function-path"
POSTPROCESS = "--rollout-data-postprocess-path"


def after_initialization(path: str | None, hook_args: RunArguments) -> None:
    """Call the function of --custom-megatron-init-path with `hook_args`."""
    if (function := _found(_INIT, path, MegatronInit)) is not None:
        function(hook_args)


class TrainingHooks:
    """The custom training hooks; `advantages` and `postprocess` are None without their flags."""

    def __init__(
        self,
        algorithm: AlgorithmArguments,
        model: Sequence[torch.nn.Module],
        optimizer: Any,
        scheduler: Any,
        hook_args: RunArguments,
    ) -> None:
        """`hook_args` is the first argument of each function."""
        self._model = list(model)
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._custom_loss = algorithm.loss_type == "custom_loss"

        def found(flag: str, path: str | None, contract: type[Hook]) -> Callable[..., Any] | None:
            function = _found(flag, path, contract)
            return None if function is None else functools.partial(function, hook_args)

        before_log_prob = algorithm.custom_megatron_before_log_prob_hook_path
        before_step = algorithm.custom_megatron_before_train_step_hook_path
        self._before_log_prob = found(_BEFORE_LOG_PROB, before_log_prob, BeforeLogProb)
        self._before_step = found(_BEFORE_STEP, before_step, BeforeTrainStep)
        self.advantages = found(ADVANTAGE, algorithm.custom_advantage_function_path, CustomAdvantage)
        self.postprocess = found(POSTPROCESS, algorithm.rollout_data_postprocess_path, Postprocess)

    @property
    def see_rollout_data(self) -> bool:
        """Whether a custom loss or function receives the rank's part of a rollout as a dict."""
        return self._custom_loss or self.advantages is not None or self.postprocess is not None

    def before_log_probs(self, store_prefix: str) -> None:
        """Call the hook; `store_prefix` is "ref_" or "teacher_" while the weights of that model are loaded."""
        if self._before_log_prob is not None:
            self._before_log_prob(self._model, store_prefix)

    def before_step(self, rollout_id: int, step_id: int) -> None:
        """Call the hook, with gradients at zero."""
        if self._before_step is not None:
            self._before_step(rollout_id, step_id, self._model, self._optimizer, self._scheduler)


def _found(flag: str, path: str | None, contract: type[Hook]) -> Callable[..., Any] | None:
    return None if path is None else named(flag, path, contract)


RolloutData = dict[str, Any]


def build_train_inputs(
    algorithm: AlgorithmArguments,
    hooks: TrainingHooks,
    rollout_id: int,
    batch: RolloutBatch,
    log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
    values: Tensor | None,
    group: dist.ProcessGroup,
    device: torch.device,
    teacher: TeacherTerm | None = None,
) -> tuple[TrainTensors, RolloutData | None]:
    """The loss's inputs except the model's output, and the same as a dict for custom functions (None without these).

    `log_probs` [response tokens of the rank] is None for a loss without advantages, `values` without a critic,
    `teacher` without --use-opd; `group` contains the data-parallel ranks. Raises HookFailedError if a custom function
    raises or leaves entries that do not match the samples.
    """
    columns = {"loss_masks": batch.loss_mask.to(device, copy=True)}
    if log_probs is not None:
        columns |= {"log_probs": log_probs, "rollout_log_probs": batch.rollout_log_probs.to(device, copy=True)}
    if ref_log_probs is not None:
        columns["ref_log_probs"] = ref_log_probs
    if values is not None:
        columns["values"] = values
    if teacher is not None:
        columns["teacher_log_probs"] = teacher.log_probs
    data = _as_dict(batch, columns, device) if hooks.see_rollout_data else None
    if log_probs is not None:
        if data is not None:
            data["kl"] = _split(_kl(algorithm, log_probs, ref_log_probs), batch)
        columns |= _advantages(algorithm, hooks, batch, columns, data, group, teacher)
    if hooks.postprocess is not None:
        assert data is not None  # `see_rollout_data`
        hooks.postprocess(rollout_id, data)
        _check_unchanged(data, batch, f"{POSTPROCESS} {algorithm.rollout_data_postprocess_path}")
    if data is not None and (hooks.advantages is not None or hooks.postprocess is not None):
        flag = POSTPROCESS if hooks.postprocess is not None else ADVANTAGE
        columns = {name: _joined(data, name, batch, flag, device) for name in columns}
    tensors = _as_columns(algorithm, columns)
    if log_probs is not None and algorithm.positive_example_loss_coef != 0.0:
        weights = positive_example_weights(algorithm, batch, tensors.loss_mask, group)
        tensors = dataclasses.replace(tensors, positive_weights=weights)
    if log_probs is not None and (weighting := importance_weighting(algorithm)) is not None and weighting.normalized:
        tensors = dataclasses.replace(tensors, weight_scales=weight_scales(weighting, batch, tensors, group))
    return tensors, data


def positive_example_weights(
    algorithm: AlgorithmArguments, batch: RolloutBatch, mask: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Weights [response tokens] with which the loss of a step has the mean over the tokens of its positive examples.

    Yue et al. 2025 (VAPO), section 4.3: a mean over all trained tokens of the samples whose raw reward is at least
    --positive-example-reward. A step's loss is divided by its count, so the weight of these tokens is this count
    divided by their number, both of the whole step. `group` contains the data-parallel ranks; collective.
    """
    device, lengths = mask.device, batch.response_lengths.to(mask.device)
    trained = sums_per_sample((mask != 0).double(), lengths)
    positive = (batch.raw_rewards.to(device) >= algorithm.positive_example_reward).double()
    totals, step_of_sample = _totals_of_steps(batch, torch.stack([trained, positive * trained], dim=1), group)
    counts = torch.tensor(batch.samples_per_step, dtype=torch.float64, device=device)
    counts = totals[:, 0] if algorithm.calculate_per_token_loss else counts
    of_samples = positive * (counts / totals[:, 1].clamp(min=1.0))[step_of_sample]
    repeated = torch.repeat_interleave(of_samples, lengths, output_size=mask.numel())
    return repeated.masked_fill(mask == 0, 0.0).to(torch.float32)


def weight_scales(
    weighting: ImportanceWeighting, batch: RolloutBatch, tensors: TrainTensors, group: dist.ProcessGroup
) -> Tensor:
    """Float32 [response tokens]: 1 / the mean importance weight of the token's optimizer step (--tis-batch-normalize).

    The mean is over the trained tokens of the whole step, or over its samples that have any, by the level of the
    weights. 1 where all weights of a step are 0. `group` contains the data-parallel ranks; collective.
    """
    lengths = batch.response_lengths.to(tensors.loss_mask.device)
    policies = tensors.train_log_probs, tensors.rollout_log_probs
    own = weight_totals(*policies, tensors.loss_mask, lengths, weighting)
    totals, step_of_sample = _totals_of_steps(batch, own, group)
    scales = torch.where(totals[:, 0] > 0, totals[:, 1] / totals[:, 0], 1.0)[step_of_sample]
    return torch.repeat_interleave(scales, lengths, output_size=tensors.loss_mask.numel()).to(torch.float32)


def _totals_of_steps(batch: RolloutBatch, of_samples: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """`of_samples` [n, k] summed over each optimizer step of all ranks, [steps, k]; and the step of each sample [n]."""
    step_of_sample = torch.zeros(len(batch), dtype=torch.int64)
    for number, micro_batches in enumerate(batch.micro_batches):
        for rows in micro_batches:
            step_of_sample[rows] = number
    step_of_sample = step_of_sample.to(of_samples.device)
    totals = of_samples.new_zeros(len(batch.micro_batches), of_samples.shape[1])
    totals.index_add_(0, step_of_sample, of_samples)
    dist.all_reduce(totals, group=group)
    return totals, step_of_sample


def _advantages(
    algorithm: AlgorithmArguments,
    hooks: TrainingHooks,
    batch: RolloutBatch,
    columns: dict[str, Tensor],
    data: RolloutData | None,
    group: dist.ProcessGroup,
    teacher: TeacherTerm | None,
) -> dict[str, Tensor]:
    """Advantages, less the teacher's penalty, and returns from the custom function or the estimator.

    They are also stored in `data`.
    """
    penalty = None
    if teacher is not None:
        student = columns["rollout_log_probs" if algorithm.use_rollout_logprobs else "log_probs"]
        penalty = teacher.penalty(student, columns["loss_masks"])
    if hooks.advantages is None:
        policies = columns["log_probs"], columns.get("ref_log_probs")
        advantages, returns = token_advantages(algorithm, batch, *policies, columns.get("values"), group, penalty)
    else:
        assert data is not None  # `see_rollout_data`
        hooks.advantages(data)
        where = f"{ADVANTAGE} {algorithm.custom_advantage_function_path}"
        _check_unchanged(data, batch, where)
        device = columns["log_probs"].device
        advantages = _joined(data, "advantages", batch, where, device)
        if "values" not in columns:  # with a critic they are its targets, which only the function knows
            data.setdefault("returns", data["advantages"])
        returns = _joined(data, "returns", batch, where, device)
        advantages = advantages if penalty is None else advantages - penalty
        if algorithm.normalize_advantages:
            advantages = whitened(advantages, columns["loss_masks"], group)
    found = {"advantages": advantages, "returns": returns}
    if data is not None:
        data |= {name: _split(value, batch) for name, value in found.items()}
    return found


def _as_dict(batch: RolloutBatch, columns: dict[str, Tensor], device: torch.device) -> RolloutData:
    """The entries are views of the columns: a change in place reaches the columns, and never `batch`."""
    return {
        "tokens": list(batch.tokens.to(device, copy=True).split(batch.total_lengths.tolist())),
        "total_lengths": batch.total_lengths.tolist(),
        "response_lengths": batch.response_lengths.tolist(),
        "rewards": batch.rewards.tolist(),
        "raw_reward": batch.raw_rewards.tolist(),
        "truncated": batch.truncated.tolist(),
        "sample_indices": batch.sample_ids.tolist(),
        "rollout_ids": batch.group_ids.tolist(),
        "rollout_log_probs": _split(batch.rollout_log_probs.to(device, copy=True), batch),
        **({} if batch.token_rewards is None else {"token_rewards": _split(batch.token_rewards.to(device), batch)}),
        **{name: _split(values, batch) for name, values in columns.items()},
    }


def _split(values: Tensor, batch: RolloutBatch) -> list[Tensor]:
    return list(values.split(batch.response_lengths.tolist()))


def _joined(data: RolloutData, name: str, batch: RolloutBatch, where: str, device: torch.device) -> Tensor:
    """Concatenate an entry into a column. Raises HookFailedError if it is missing or has another length."""
    lengths = batch.response_lengths.tolist()
    if name not in data:
        raise HookFailedError(f'{where} left no rollout_data["{name}"]: set it to a list of one tensor per sample')
    found = [list(entry.shape) if isinstance(entry, Tensor) else type(entry).__name__ for entry in data[name]]
    if found != [[length] for length in lengths]:
        wrong = next((row for row, (shape, n) in enumerate(zip(found, lengths, strict=False)) if shape != [n]), None)
        what = (
            f"has {len(found)} entries for {len(lengths)} samples"
            if wrong is None
            else f"has {found[wrong]} at sample {data['sample_indices'][wrong]}, whose response has {lengths[wrong]}"
        )
        raise HookFailedError(f'{where}: rollout_data["{name}"] {what}: give a tensor [response length] per sample')
    if not lengths:
        return torch.zeros(0, device=device)
    return torch.cat([entry.detach() for entry in data[name]]).to(device, torch.float32)


def _check_unchanged(data: RolloutData, batch: RolloutBatch, where: str) -> None:
    """Raise HookFailedError if tokens changed: micro-batches are already packed."""
    same = (
        data.get("total_lengths") == batch.total_lengths.tolist()
        and data.get("response_lengths") == batch.response_lengths.tolist()
        and torch.equal(_joined_tokens(data, batch), batch.tokens)
    )
    if not same:
        raise HookFailedError(
            f"{where} changed tokens or lengths, which are already packed: mask tokens with loss_masks, or change"
            " samples with --custom-convert-samples-to-train-data-path"
        )


def _joined_tokens(data: RolloutData, batch: RolloutBatch) -> Tensor:
    return torch.cat([*(entry.cpu() for entry in data.get("tokens", [])), batch.tokens.new_zeros(0)])


def _kl(algorithm: AlgorithmArguments, log_probs: Tensor, ref_log_probs: Tensor | None) -> Tensor:
    if algorithm.kl_coef == 0.0 or ref_log_probs is None:
        return torch.zeros_like(log_probs)
    return kl_estimate(log_probs, ref_log_probs, algorithm.kl_loss_type)


def _as_columns(algorithm: AlgorithmArguments, columns: dict[str, Tensor]) -> TrainTensors:
    if "log_probs" not in columns:
        return TrainTensors.without_policy(columns["loss_masks"], columns.get("ref_log_probs"))
    return TrainTensors(
        old_log_probs=columns["rollout_log_probs" if algorithm.use_rollout_logprobs else "log_probs"],
        train_log_probs=columns["log_probs"],
        rollout_log_probs=columns["rollout_log_probs"],
        ref_log_probs=columns.get("ref_log_probs"),
        advantages=columns["advantages"],
        loss_mask=columns["loss_masks"],
        returns=columns["returns"],
        values=columns.get("values"),
        teacher_log_probs=columns.get("teacher_log_probs"),
    )
