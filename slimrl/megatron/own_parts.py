"""Parts of the policy loss by functions of the user's: the off-policy correction, and the mean.

Promises that what they give back fits the micro-batch, or says what does not. Called by `loss`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.hooks import CustomTIS, HookFailedError, PgLossReducer, named, naming_calls

_TIS = "--custom-tis-function-path"
_REDUCER = "--custom-pg-loss-reducer-function-path"


@dataclasses.dataclass(frozen=True)
class OwnParts:
    """The functions, each None where slimrl's own way is taken."""

    correction: Callable[..., Any] | None = None
    reducer: Callable[..., Any] | None = None
    correction_name: str = ""
    reducer_name: str = ""

    @classmethod
    def from_args(cls, args: Arguments) -> OwnParts:
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
