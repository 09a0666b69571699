"""The policy loss of one micro-batch, as sums that do not depend on the split into micro-batches.

The sums over micro-batches and data-parallel ranks, divided by the sum of their counts, are the loss of the step.
The formulas are in `slimrl.algorithms`.

The off-policy correction (`--custom-tis-function-path`) and the mean (`--custom-pg-loss-reducer-function-path`) may be
custom functions. HookFailedError names a returned value that does not match the micro-batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slimrl.algorithms import off_policy
from slimrl.algorithms.estimators import ESTIMATORS, Objective
from slimrl.algorithms.losses import (
    KLKind,
    PolicyLoss,
    cispo_loss,
    clipped_policy_loss,
    importance_ratio,
    kl_estimate,
    masked_sum,
    sample_mean_weights,
)
from slimrl.algorithms.preference_losses import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES
from slimrl.arguments import Arguments
from slimrl.arguments.flags.algorithm import AlgorithmArguments
from slimrl.hooks import CustomTIS, HookFailedError, PgLossReducer, named, naming_calls
from slimrl.hooks.contracts import RunArguments
from slimrl.megatron.training.loss.loss_sums import LossMetricNames, LossSums, named_sums, summed

_TIS = "--custom-tis-function-path"
_REDUCER = "--custom-pg-loss-reducer-function-path"


@dataclasses.dataclass(frozen=True)
class PolicyLossHooks:
    """The custom functions of the policy loss; None for the built-in computation."""

    correction: Callable[..., Any] | None = None
    reducer: Callable[..., Any] | None = None
    correction_name: str = ""
    reducer_name: str = ""

    @classmethod
    def from_args(cls, algorithm: AlgorithmArguments, hook_args: RunArguments) -> PolicyLossHooks:
        """`hook_args` is the functions' `args`. Raises HookError if a path has no function with that signature."""
        tis, reducer = algorithm.custom_tis_function_path, algorithm.custom_pg_loss_reducer_function_path
        return cls(
            correction=None if tis is None else partial(named(_TIS, tis, CustomTIS), hook_args),
            reducer=None if reducer is None else named(_REDUCER, reducer, PgLossReducer),
            correction_name=f"{_TIS} {tis}",
            reducer_name=f"{_REDUCER} {reducer}",
        )

    def corrected(
        self,
        loss: Tensor,
        train_log_probs: Tensor,
        rollout_log_probs: Tensor,
        mask: Tensor,
        total_lengths: list[int],
        response_lengths: list[int],
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The corrected loss, the mask for means, and values to log, [tokens] each."""
        assert self.correction is not None  # checked by the caller
        answer = self.correction(
            pg_loss=loss,
            train_log_probs=list(train_log_probs.split(response_lengths)),
            rollout_log_probs=list(rollout_log_probs.split(response_lengths)),
            loss_masks=list(mask.split(response_lengths)),
            total_lengths=total_lengths,
            response_lengths=response_lengths,
        )
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise HookFailedError(f"{self.correction_name} returned {_kind(answer)}: return (pg_loss, masks, metrics)")
        corrected, masks, metrics = answer
        _check_tokens(corrected, loss, f"{self.correction_name}: its pg_loss")
        if [list(entry.shape) for entry in masks] != [[length] for length in response_lengths]:
            raise HookFailedError(
                f"{self.correction_name}: its masks do not fit the samples: return a list of one tensor [response"
                " length] per sample"
            )
        for name, values in metrics.items():
            _check_tokens(values, loss, f"{self.correction_name}: its metric {name}")
        new_mask = torch.cat(masks).to(mask) if masks else mask
        if bool(((mask == 0) & (new_mask != 0)).any()):
            raise HookFailedError(
                f"{self.correction_name}: its masks train on tokens that were masked before: keep their 0"
            )
        return corrected, new_mask, metrics

    def reduced(
        self, loss: Tensor, mask: Tensor, total_lengths: list[int], response_lengths: list[int], per_token: bool
    ) -> Tensor:
        """The loss as a scalar."""
        assert self.reducer is not None  # checked by the caller
        reducer = self.reducer(total_lengths, response_lengths, list(mask.split(response_lengths)), per_token)
        if not callable(reducer):
            raise HookFailedError(
                f"{self.reducer_name} returned {_kind(reducer)}: return a function of [tokens] that gives a number"
            )
        flag, _, path = self.reducer_name.partition(" ")
        value = naming_calls(flag, path, reducer)(loss)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise HookFailedError(f"{self.reducer_name}: its reducer returned {_kind(value)}: return a tensor of one")
        return value.reshape(())


def _check_tokens(values: Any, like: Tensor, what: str) -> None:
    if not isinstance(values, Tensor) or values.shape != like.shape:
        raise HookFailedError(f"{what} is {_kind(values)}: return a tensor {list(like.shape)}, one value per token")


def _kind(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a value of type {type(value).__name__}"


_NO_HOOKS = PolicyLossHooks()


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig:
    """The flags of the loss."""

    eps_clip: float
    eps_clip_high: float
    eps_clip_c: float | None
    entropy_coef: float
    kl_loss_coef: float
    kl_loss_type: KLKind
    per_token: bool
    tokens_per_sample: int | None = None  # constant divisor of a sample's sum; None: its own trained tokens
    supervised: bool = False  # likelihood of the given tokens instead of a policy loss
    objective: Objective = Objective.PPO_CLIP
    unbiased_kl: bool = False
    weighting: off_policy.ImportanceWeighting | None = None  # None: no importance weights
    rejection: off_policy.Rejection | None = None  # None: no token or sample is rejected
    positive_coef: float = 0.0  # of the likelihood loss on positive examples
    divergence_coef: float | None = None  # of the divergence from a teacher; None without one
    opsm_delta: float | None = None  # None: no sequence is masked
    own_metrics: tuple[str, ...] = ()  # of a preference loss or a reward model's, which computes its sums itself
    is_custom_loss: bool = False  # --loss-type custom_loss: `custom_loss.CheckedCustomLoss` computes the sums
    loss_hooks: PolicyLossHooks = _NO_HOOKS
    needs_old_log_probs: bool = True  # whether there are log-probabilities of other policies

    @classmethod
    def from_args(cls, algorithm: Arguments, loss_hooks: PolicyLossHooks = _NO_HOOKS) -> PolicyLossConfig:
        """The settings of a run; without --use-kl-loss the KL's coefficient is 0."""
        rejection = off_policy.Rejection(
            algorithm.rs_level, algorithm.rs_lower_bound, algorithm.rs_upper_bound, algorithm.rs_veto_threshold
        )
        row = ESTIMATORS[algorithm.advantage_estimator]
        return cls(
            eps_clip=algorithm.eps_clip,
            eps_clip_high=algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high,
            eps_clip_c=algorithm.eps_clip_c,
            entropy_coef=algorithm.entropy_coef,
            kl_loss_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
            kl_loss_type=algorithm.kl_loss_type,
            per_token=algorithm.calculate_per_token_loss,
            supervised=algorithm.loss_type == "sft_loss",
            tokens_per_sample=algorithm.rollout_max_response_len if row.divides_by_longest else None,
            objective=row.objective,
            unbiased_kl=algorithm.use_unbiased_kl,
            weighting=importance_weighting(algorithm),
            rejection=rejection if algorithm.use_rs and loss_hooks.correction is None else None,
            positive_coef=algorithm.positive_example_loss_coef,
            divergence_coef=algorithm.opd_kl_coef if algorithm.has_divergence else None,
            opsm_delta=algorithm.opsm_delta if algorithm.use_opsm else None,
            own_metrics=_own_metrics(algorithm),
            is_custom_loss=algorithm.loss_type == "custom_loss",
            loss_hooks=loss_hooks,
            needs_old_log_probs=algorithm.compute_advantages_and_returns and algorithm.loss_type != "sft_loss",
        )

    @functools.cached_property
    def metric_names(self) -> LossMetricNames:
        """The metric names of this loss, also for ranks without the last stage: computed from one token of zeros."""
        zero = torch.zeros(1)
        if self.is_custom_loss or self.own_metrics:
            own = dict.fromkeys(("loss", *self.own_metrics), zero.sum())
            return named_sums(zero.sum(), zero.sum(), zero.sum(), own).names
        one = torch.ones(1, dtype=torch.int64)
        inputs = PolicyLossInputs(*(zero,) * 8, one, positive_weights=zero, weight_scales=zero, divergence=zero)
        return policy_loss_sums(inputs, dataclasses.replace(self, loss_hooks=_NO_HOOKS)).names


def importance_weighting(flags: AlgorithmArguments) -> off_policy.ImportanceWeighting | None:
    """The weights of --use-tis; None without it, or if a custom function takes their place."""
    if not flags.use_tis or flags.custom_tis_function_path is not None:
        return None
    bounds, masks = (flags.tis_clip_low, flags.tis_clip), flags.tis_mode == "mask"
    return off_policy.ImportanceWeighting(*bounds, flags.tis_level, masks, flags.tis_batch_normalize)


def _own_metrics(algorithm: AlgorithmArguments) -> tuple[str, ...]:
    if algorithm.trains_reward_model:
        return REWARD_MODEL_LOSSES[algorithm.reward_model_loss].metrics
    return PREFERENCE_LOSSES[algorithm.preference_loss].metrics if algorithm.trains_on_pairs else ()


@dataclasses.dataclass(frozen=True)
class PolicyLossInputs:
    """The response tokens of one micro-batch, samples concatenated; float32 [tokens] unless stated otherwise."""

    log_probs: Tensor  # of the policy being trained, differentiable
    entropy: Tensor  # of its distributions, differentiable
    old_log_probs: Tensor  # of the policy in the ratio's denominator
    train_log_probs: Tensor  # the trainer's before the rollout's first optimizer step
    rollout_log_probs: Tensor  # the engines'
    ref_log_probs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    response_lengths: Tensor  # int64 [samples]
    lengths: tuple[tuple[int, int], ...] = ()  # (total, response) of each sample, for custom functions
    positive_weights: Tensor | None = None  # 0 outside positive examples; see `advantages.positive_example_weights`
    weight_scales: Tensor | None = None  # factors of the importance weights; see `advantages.weight_scales`
    divergence: Tensor | None = None  # of the policy's distributions from a teacher's, differentiable


def policy_loss_sums(inputs: PolicyLossInputs, settings: PolicyLossConfig) -> LossSums:
    """Clipped policy loss - entropy_coef * entropy + kl_loss_coef * KL(policy || reference), summed.

    With divergence_coef also that times the divergence from a teacher. With positive_coef also the likelihood loss of
    positive examples, weighted to be a mean over their tokens.
    Per token: the sum over trained tokens; the count is the trained tokens. Otherwise: the sum over samples of the
    mean over the sample's trained tokens, or of their sum / tokens_per_sample; the count is the samples (fully masked
    ones add 0 and count). Metrics other than the loss and its policy term are means over a sample's tokens.
    """
    inputs = _without_masked_values(inputs)
    if settings.supervised:
        return _supervised_sums(inputs, settings)
    policy = _policy_loss(inputs, settings)
    corrected, correction, corrections = _corrected(policy.loss, inputs, settings)
    trained_tokens, count = _counts(inputs, settings)
    corrected, mask, noted = _custom_correction(corrected, correction.mask, inputs, settings)
    weights = mask if settings.per_token else sample_mean_weights(mask, inputs.response_lengths)
    of_loss = weights if settings.tokens_per_sample is None else mask / settings.tokens_per_sample
    reduced = _custom_reduction(corrected, mask, inputs, settings)
    positive = None
    if settings.positive_coef != 0.0:
        assert inputs.positive_weights is not None  # from `build_train_inputs`
        positive = masked_sum(-inputs.log_probs, mask * inputs.positive_weights)
    per_token = corrected if reduced is None else torch.zeros_like(corrected)
    per_token, kl = _with_entropy_and_kl(per_token, inputs, settings)
    loss = masked_sum(per_token, of_loss)
    if reduced is not None:
        loss = loss + reduced
    if positive is not None:
        loss = loss + settings.positive_coef * positive

    with torch.no_grad():
        values = {
            "entropy_loss": inputs.entropy,
            "pg_clipfrac": policy.clipped,
            "ppo_kl": inputs.old_log_probs - inputs.log_probs,
            "kl_loss": kl,
            "ratio_mean": policy.ratio,
            **corrections,
        }
        if inputs.divergence is not None and settings.divergence_coef is not None:
            values["opd_divergence"] = inputs.divergence
        weighted = summed({"loss": per_token, "pg_loss": corrected}, of_loss) | summed(values, weights)
        if reduced is not None:
            weighted["loss"] = weighted["loss"] + reduced
            weighted["pg_loss"] = reduced.detach().double()
        if positive is not None:
            weighted["positive_example_loss"] = positive.detach().double()
            weighted["loss"] = weighted["loss"] + settings.positive_coef * positive
        return named_sums(
            loss,
            count,
            trained_tokens,
            weighted,
            mismatch=(inputs.train_log_probs - inputs.rollout_log_probs).abs(),
            ratio_gap=(policy.ratio - 1).abs(),
            correction=correction,
            custom=summed(noted, weights),
        )


def _custom_correction(
    loss: Tensor, mask: Tensor, inputs: PolicyLossInputs, settings: PolicyLossConfig
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The policy loss per token, the mask for means, and values to log, from --custom-tis-function-path."""
    if settings.loss_hooks.correction is None:
        return loss, mask, {}
    policies = inputs.train_log_probs, inputs.rollout_log_probs
    return settings.loss_hooks.corrected(loss, *policies, mask, *_lists_of_lengths(inputs))


def _custom_reduction(
    loss: Tensor, mask: Tensor, inputs: PolicyLossInputs, settings: PolicyLossConfig
) -> Tensor | None:
    """The policy loss as a scalar from --custom-pg-loss-reducer-function-path; None without the flag."""
    if settings.loss_hooks.reducer is None:
        return None
    return settings.loss_hooks.reduced(loss, mask, *_lists_of_lengths(inputs), settings.per_token)


def _lists_of_lengths(inputs: PolicyLossInputs) -> tuple[list[int], list[int]]:
    return [total for total, _ in inputs.lengths], [response for _, response in inputs.lengths]


def _with_entropy_and_kl(
    per_token: Tensor, inputs: PolicyLossInputs, settings: PolicyLossConfig
) -> tuple[Tensor, Tensor]:
    """The loss per token with entropy and KL terms, and the KL to the reference (0 without a reference)."""
    kl = torch.zeros_like(inputs.loss_mask)
    if settings.entropy_coef != 0.0:
        per_token = per_token - settings.entropy_coef * inputs.entropy
    if inputs.ref_log_probs is not None:
        kl = kl_estimate(inputs.log_probs, inputs.ref_log_probs, settings.kl_loss_type)
        if settings.unbiased_kl:
            kl = importance_ratio(inputs.log_probs, inputs.old_log_probs) * kl
        if settings.kl_loss_coef != 0.0:
            per_token = per_token + settings.kl_loss_coef * kl
    if settings.divergence_coef and inputs.divergence is not None:
        per_token = per_token + settings.divergence_coef * inputs.divergence
    return per_token, kl


def _counts(inputs: PolicyLossInputs, settings: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    """The number of trained tokens, and the divisor of the loss."""
    trained_tokens = (inputs.loss_mask != 0).sum()
    samples = torch.full_like(trained_tokens, inputs.response_lengths.numel())
    return trained_tokens, trained_tokens if settings.per_token else samples


def _supervised_sums(inputs: PolicyLossInputs, settings: PolicyLossConfig) -> LossSums:
    """The negative log-likelihood of the trained tokens, summed like the policy loss."""
    mask = inputs.loss_mask
    weights = mask if settings.per_token else sample_mean_weights(mask, inputs.response_lengths)
    loss = masked_sum(-inputs.log_probs, weights)
    trained_tokens, count = _counts(inputs, settings)
    with torch.no_grad():
        weighted = summed({"loss": -inputs.log_probs, "entropy_loss": inputs.entropy}, weights)
        return named_sums(loss, count, trained_tokens, weighted)


def _policy_loss(inputs: PolicyLossInputs, settings: PolicyLossConfig) -> PolicyLoss:
    """The estimator's loss per token, before any correction."""
    clip = {"eps_clip": settings.eps_clip, "eps_clip_high": settings.eps_clip_high}
    if settings.objective is Objective.CISPO:
        return cispo_loss(inputs.log_probs, inputs.old_log_probs, inputs.advantages, **clip)
    log_probs, old_log_probs = inputs.log_probs, inputs.old_log_probs
    if settings.objective is Objective.GSPO_CLIP:
        log_probs = off_policy.sequence_log_ratio(log_probs, old_log_probs, inputs.loss_mask, inputs.response_lengths)
        old_log_probs = torch.zeros_like(log_probs)
    return clipped_policy_loss(log_probs, old_log_probs, inputs.advantages, eps_clip_c=settings.eps_clip_c, **clip)


def _corrected(
    loss: Tensor, inputs: PolicyLossInputs, settings: PolicyLossConfig
) -> tuple[Tensor, off_policy.Correction, dict[str, Tensor]]:
    """The policy loss with off-policy corrections, the correction, and the values to log, [tokens] by name."""
    correction = off_policy.off_policy_correction(
        inputs.train_log_probs,
        inputs.rollout_log_probs,
        inputs.loss_mask,
        inputs.response_lengths,
        weighting=settings.weighting,
        rejection=settings.rejection,
        scales=inputs.weight_scales,
    )
    loss = loss if correction.weights is None else loss * correction.weights
    values = dict(correction.values)
    if settings.opsm_delta is not None:
        masked = off_policy.off_policy_sequence_mask(
            inputs.log_probs,
            inputs.old_log_probs,
            inputs.advantages,
            inputs.loss_mask,
            inputs.response_lengths,
            delta=settings.opsm_delta,
        )
        loss = loss * (1 - masked)
        values["opsm_clipfrac"] = masked
    return loss, correction, values


def _without_masked_values(inputs: PolicyLossInputs) -> PolicyLossInputs:
    """Set log-probabilities of masked tokens to 0: an infinite one makes the gradient NaN, even multiplied by 0."""
    masked = inputs.loss_mask == 0
    names = ("log_probs", "old_log_probs", "train_log_probs", "rollout_log_probs", "ref_log_probs", "divergence")
    values = {name: getattr(inputs, name) for name in names}
    kept: dict[str, Any] = {
        name: value if value is None else value.masked_fill(masked, 0.0) for name, value in values.items()
    }
    return dataclasses.replace(inputs, **kept)
