"""The policy loss of one micro-batch, as sums that do not depend on how the batch is cut into micro-batches.

Adding the sums over micro-batches and data-parallel ranks and dividing by the added counts gives the loss of the whole
step. The formulas are in `slimrl.algorithms`.

The off-policy correction (`--custom-tis-function-path`) and the mean (`--custom-pg-loss-reducer-function-path`) may be
custom functions. What they return must fit the micro-batch; else HookFailedError says what does not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slimrl.algorithms.estimators import ESTIMATORS, Objective
from slimrl.algorithms.kl import KLKind, kl_estimate
from slimrl.algorithms.off_policy import off_policy_sequences, sequence_log_ratio, truncated_importance_weights
from slimrl.algorithms.policy_loss import PolicyLoss, cispo_loss, clipped_policy_loss, importance_ratio
from slimrl.algorithms.reduction import masked_sum, sample_mean_weights
from slimrl.arguments import Arguments
from slimrl.hooks import CustomTIS, HookFailedError, PgLossReducer, named, naming_calls
from slimrl.megatron.training.loss_metrics import LossMetricNames, PolicyLossSums, summed

_TIS = "--custom-tis-function-path"
_REDUCER = "--custom-pg-loss-reducer-function-path"


@dataclasses.dataclass(frozen=True)
class PolicyLossHooks:
    """The functions, each None where slimrl's own way is taken."""

    correction: Callable[..., Any] | None = None
    reducer: Callable[..., Any] | None = None
    correction_name: str = ""
    reducer_name: str = ""

    @classmethod
    def from_args(cls, args: Arguments) -> PolicyLossHooks:
        """Raises HookError where a path leads to nothing that keeps its contract."""
        tis, reducer = args.custom_tis_function_path, args.custom_pg_loss_reducer_function_path
        return cls(
            correction=None if tis is None else partial(named(_TIS, tis, CustomTIS), args),
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
        """The loss, the mask to take means with and values to log, [tokens] each as they came in."""
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
        """The loss as one number."""
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


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig:
    """The flags that shape the loss."""

    eps_clip: float
    eps_clip_high: float
    eps_clip_c: float | None
    entropy_coef: float
    kl_loss_coef: float
    kl_loss_type: KLKind
    per_token: bool
    supervised: bool = False  # the likelihood of the given tokens instead of a policy loss
    objective: Objective = Objective.CLIPPED_TOKEN_RATIO
    unbiased_kl: bool = False
    tis_bounds: tuple[float, float] | None = None  # None: no importance correction
    opsm_delta: float | None = None  # None: no sequence is left out
    own: bool = False  # the loss is a function of the user's, which `own_loss` calls
    own_parts: PolicyLossHooks = PolicyLossHooks()
    compares_policies: bool = True  # whether there are log-probabilities of other policies

    @classmethod
    def from_args(cls, args: Arguments) -> PolicyLossConfig:
        """The settings of a run; a KL loss that is only logged has coefficient 0."""
        own_parts = PolicyLossHooks.from_args(args)
        return cls(
            eps_clip=args.eps_clip,
            eps_clip_high=args.eps_clip if args.eps_clip_high is None else args.eps_clip_high,
            eps_clip_c=args.eps_clip_c,
            entropy_coef=args.entropy_coef,
            kl_loss_coef=args.kl_loss_coef if args.use_kl_loss else 0.0,
            kl_loss_type=args.kl_loss_type,
            per_token=args.calculate_per_token_loss,
            supervised=args.loss_type == "sft_loss",
            objective=ESTIMATORS[args.advantage_estimator].objective,
            unbiased_kl=args.use_unbiased_kl,
            tis_bounds=(args.tis_clip_low, args.tis_clip) if args.use_tis and own_parts.correction is None else None,
            opsm_delta=args.opsm_delta if args.use_opsm else None,
            own=args.loss_type == "custom_loss",
            own_parts=own_parts,
            compares_policies=args.compute_advantages_and_returns and args.loss_type != "sft_loss",
        )

    @functools.cached_property
    def metric_names(self) -> LossMetricNames:
        """The names in this loss's sums, for ranks that compute none too: those of the sums of one token of zeros."""
        zero = torch.zeros(1)
        if self.own:
            return named_sums(zero.sum(), zero.sum(), zero.sum(), {"loss": zero.sum()}).names
        one = torch.ones(1, dtype=torch.int64)
        inputs = PolicyLossInputs(zero, zero, zero, zero, zero, zero, zero, zero, response_lengths=one)
        return policy_loss_sums(inputs, dataclasses.replace(self, own_parts=PolicyLossHooks())).names


@dataclasses.dataclass(frozen=True)
class PolicyLossInputs:
    """The response tokens of one micro-batch, samples end to end; float32 [tokens] unless said otherwise."""

    log_probs: Tensor  # of the policy in training, differentiable
    entropy: Tensor  # of its distributions, differentiable
    old_log_probs: Tensor  # the policy the ratio is taken against
    train_log_probs: Tensor  # the trainer's before the rollout's first optimizer step
    rollout_log_probs: Tensor  # the engines'
    ref_log_probs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    response_lengths: Tensor  # int64 [samples]
    lengths: tuple[tuple[int, int], ...] = ()  # the whole's and the response's, for functions of the user's


def policy_loss_sums(inputs: PolicyLossInputs, settings: PolicyLossConfig) -> PolicyLossSums:
    """Clipped policy loss - entropy_coef * entropy + kl_loss_coef * KL(policy || reference), summed.

    Per token: the sum over trained tokens, counted in trained tokens. Otherwise: the sum over samples of the mean
    over the sample's trained tokens, counted in samples (also the fully masked ones, which add 0).
    """
    inputs = _without_masked_values(inputs)
    if settings.supervised:
        return _supervised_sums(inputs, settings)
    policy = _policy_loss(inputs, settings)
    corrected, corrections = _corrected(policy.loss, inputs, settings)
    trained_tokens, count = _counts(inputs, settings)
    corrected, mask, noted = _corrected_by_the_user(corrected, inputs, settings)
    weights = mask if settings.per_token else sample_mean_weights(mask, inputs.response_lengths)
    reduced = _reduced_by_the_user(corrected, mask, inputs, settings)
    per_token = corrected if reduced is None else torch.zeros_like(corrected)
    per_token, kl = _with_entropy_and_kl(per_token, inputs, settings)
    loss = masked_sum(per_token, weights)
    if reduced is not None:
        loss = loss + reduced

    with torch.no_grad():
        values = {
            "loss": per_token,
            "pg_loss": corrected,
            "entropy_loss": inputs.entropy,
            "pg_clipfrac": policy.clipped,
            "ppo_kl": inputs.old_log_probs - inputs.log_probs,
            "kl_loss": kl,
            "ratio_mean": policy.ratio,
            **corrections,
        }
        weighted = summed(values, weights)
        if reduced is not None:
            weighted["loss"] = weighted["loss"] + reduced
            weighted["pg_loss"] = reduced.detach().double()
        return named_sums(
            loss,
            count,
            trained_tokens,
            weighted,
            mismatch=(inputs.train_log_probs - inputs.rollout_log_probs).abs(),
            ratio_gap=(policy.ratio - 1).abs(),
            own=summed(noted, weights),
        )


def named_sums(
    loss: Tensor,
    count: Tensor,
    trained_tokens: Tensor,
    weighted: dict[str, Tensor],
    *,
    mismatch: Tensor | None = None,
    ratio_gap: Tensor | None = None,
    own: dict[str, Tensor] | None = None,
) -> PolicyLossSums:
    """The sums of any loss. `mismatch` is |train - rollout log-probability|, `ratio_gap` |policy / old policy - 1|.

    Both are [tokens], 0 where masked; a loss that does without them reports 0.
    """
    none = torch.zeros(0, dtype=torch.float64, device=trained_tokens.device)
    mismatch = none if mismatch is None else mismatch
    ratio_gap = none if ratio_gap is None else ratio_gap
    return PolicyLossSums(
        loss=loss,
        count=count.to(torch.int32),
        trained_tokens=trained_tokens.double(),
        weighted=weighted,
        by_token={"train_rollout_logprob_abs_diff_mean": mismatch.double().sum()},
        maxima={
            "ratio_max_abs_diff": _largest(ratio_gap).double(),
            "train_rollout_logprob_abs_diff_max": _largest(mismatch).double(),
        },
        own=own or {},
    )


def _corrected_by_the_user(
    loss: Tensor, inputs: PolicyLossInputs, settings: PolicyLossConfig
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The policy loss per token, the mask to take means with, and values to log, by --custom-tis-function-path."""
    if settings.own_parts.correction is None:
        return loss, inputs.loss_mask, {}
    policies = inputs.train_log_probs, inputs.rollout_log_probs
    return settings.own_parts.corrected(loss, *policies, inputs.loss_mask, *_lists_of_lengths(inputs))


def _reduced_by_the_user(
    loss: Tensor, mask: Tensor, inputs: PolicyLossInputs, settings: PolicyLossConfig
) -> Tensor | None:
    """The policy loss as one number, by --custom-pg-loss-reducer-function-path; None without it."""
    if settings.own_parts.reducer is None:
        return None
    return settings.own_parts.reduced(loss, mask, *_lists_of_lengths(inputs), settings.per_token)


def _lists_of_lengths(inputs: PolicyLossInputs) -> tuple[list[int], list[int]]:
    return [total for total, _ in inputs.lengths], [response for _, response in inputs.lengths]


def _with_entropy_and_kl(
    per_token: Tensor, inputs: PolicyLossInputs, settings: PolicyLossConfig
) -> tuple[Tensor, Tensor]:
    """The loss per token with what the coefficients add to it, and the KL to the reference (0 without one)."""
    kl = torch.zeros_like(inputs.loss_mask)
    if settings.entropy_coef != 0.0:
        per_token = per_token - settings.entropy_coef * inputs.entropy
    if inputs.ref_log_probs is not None:
        kl = kl_estimate(inputs.log_probs, inputs.ref_log_probs, settings.kl_loss_type)
        if settings.unbiased_kl:
            kl = importance_ratio(inputs.log_probs, inputs.old_log_probs) * kl
        if settings.kl_loss_coef != 0.0:
            per_token = per_token + settings.kl_loss_coef * kl
    return per_token, kl


def _counts(inputs: PolicyLossInputs, settings: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    """The trained tokens, and what the loss is divided by."""
    trained_tokens = (inputs.loss_mask != 0).sum()
    samples = torch.full_like(trained_tokens, inputs.response_lengths.numel())
    return trained_tokens, trained_tokens if settings.per_token else samples


def _supervised_sums(inputs: PolicyLossInputs, settings: PolicyLossConfig) -> PolicyLossSums:
    """The negative log-likelihood of the trained tokens, summed as the policy loss is."""
    mask = inputs.loss_mask
    weights = mask if settings.per_token else sample_mean_weights(mask, inputs.response_lengths)
    loss = masked_sum(-inputs.log_probs, weights)
    trained_tokens, count = _counts(inputs, settings)
    with torch.no_grad():
        weighted = summed({"loss": -inputs.log_probs, "entropy_loss": inputs.entropy}, weights)
        return named_sums(loss, count, trained_tokens, weighted)


def _policy_loss(inputs: PolicyLossInputs, settings: PolicyLossConfig) -> PolicyLoss:
    """The estimator's own loss per token, before any correction."""
    clip = {"eps_clip": settings.eps_clip, "eps_clip_high": settings.eps_clip_high}
    if settings.objective is Objective.CLIPPED_WEIGHT:
        return cispo_loss(inputs.log_probs, inputs.old_log_probs, inputs.advantages, **clip)
    log_probs, old_log_probs = inputs.log_probs, inputs.old_log_probs
    if settings.objective is Objective.CLIPPED_SEQUENCE_RATIO:
        log_probs = sequence_log_ratio(log_probs, old_log_probs, inputs.loss_mask, inputs.response_lengths)
        old_log_probs = torch.zeros_like(log_probs)
    return clipped_policy_loss(log_probs, old_log_probs, inputs.advantages, eps_clip_c=settings.eps_clip_c, **clip)


def _corrected(loss: Tensor, inputs: PolicyLossInputs, settings: PolicyLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss weighted for who drew the samples, and the values to log, [tokens] by name."""
    values: dict[str, Tensor] = {}
    if settings.tis_bounds is not None:
        low, high = settings.tis_bounds
        weights, unbounded = truncated_importance_weights(
            inputs.train_log_probs, inputs.rollout_log_probs, low=low, high=high
        )
        loss = loss * weights
        values["tis"] = unbounded
        values["tis_clipfrac"] = (weights != unbounded).to(loss.dtype)
        values["tis_abs"] = (unbounded - 1).abs()
    if settings.opsm_delta is not None:
        left_out = off_policy_sequences(
            inputs.log_probs,
            inputs.old_log_probs,
            inputs.advantages,
            inputs.loss_mask,
            inputs.response_lengths,
            delta=settings.opsm_delta,
        )
        loss = loss * (1 - left_out)
        values["opsm_clipfrac"] = left_out
    return loss, values


def _without_masked_values(inputs: PolicyLossInputs) -> PolicyLossInputs:
    """Log-probabilities of masked tokens set to 0: an infinite one would turn the gradient into NaN, even times 0."""
    masked = inputs.loss_mask == 0
    names = ("log_probs", "old_log_probs", "train_log_probs", "rollout_log_probs", "ref_log_probs")
    values = {name: getattr(inputs, name) for name in names}
    kept = {name: value if value is None else value.masked_fill(masked, 0.0) for name, value in values.items()}
    return dataclasses.replace(inputs, **kept)


def _largest(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_zeros(())
