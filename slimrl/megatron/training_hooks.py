"""The user's functions around a rank's training, found once and called where docs/hooks.md says.

Promises that a function which raises is named with its flag, and that what it leaves behind fits the samples. Owned by
the trainer; custom losses and corrections have a home of their own in `own_loss` and `own_parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slimrl.arguments import Arguments
from slimrl.hooks import BeforeLogProb, BeforeTrainStep, CustomAdvantage, Hook, MegatronInit, named
from slimrl.hooks import RolloutDataPostprocess as Postprocess

_INIT = "--custom-megatron-init-path"
_BEFORE_LOG_PROB = "--custom-megatron-before-log-prob-hook-path"
_BEFORE_STEP = "--custom-megatron-before-train-step-hook-path"
ADVANTAGE = "--custom-advantage-function-path"
POSTPROCESS = "--rollout-data-postprocess-path"


def after_initialization(args: Arguments) -> None:
    """What --custom-megatron-init-path asks for."""
    if (function := _found(_INIT, args.custom_megatron_init_path, MegatronInit)) is not None:
        function(args)


class TrainingHooks:
    """`advantages` and `postprocess` are None where slimrl does alone; both take `(args, …)` as their contracts say."""

    def __init__(self, args: Arguments, model: Sequence[torch.nn.Module], optimizer: Any, scheduler: Any) -> None:
        self._args = args
        self._model = list(model)
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._before_log_prob = _found(_BEFORE_LOG_PROB, args.custom_megatron_before_log_prob_hook_path, BeforeLogProb)
        self._before_step = _found(_BEFORE_STEP, args.custom_megatron_before_train_step_hook_path, BeforeTrainStep)
        self.advantages = _found(ADVANTAGE, args.custom_advantage_function_path, CustomAdvantage)
        self.postprocess = _found(POSTPROCESS, args.rollout_data_postprocess_path, Postprocess)

    @property
    def see_rollout_data(self) -> bool:
        """Whether any function, a custom loss too, wants the rank's share of a rollout as a dict."""
        own_loss = self._args.loss_type == "custom_loss"
        return own_loss or self.advantages is not None or self.postprocess is not None

    def before_log_probs(self, store_prefix: str) -> None:
        """`store_prefix` is "ref_" while the reference's weights are in place."""
        if self._before_log_prob is not None:
            self._before_log_prob(self._args, self._model, store_prefix)

    def before_step(self, rollout_id: int, step_id: int) -> None:
        """Gradients are zero."""
        if self._before_step is not None:
            self._before_step(self._args, rollout_id, step_id, self._model, self._optimizer, self._scheduler)


def _found(flag: str, path: str | None, contract: type[Hook]) -> Callable[..., Any] | None:
    return None if path is None else named(flag, path, contract)
