"""The coefficient of the KL penalty over a run: that of --kl-coef, or moved towards --kl-target after every rollout."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from slimrl.algorithms.losses import next_kl_coef
from slimrl.arguments.flags.algorithm import AlgorithmArguments

_COEF = "kl_coef"


class KLController:
    """One rank's coefficient, equal on all ranks.

    `numbers` is what a checkpoint saves and restores in place; empty without --kl-target.
    """

    def __init__(self, algorithm: AlgorithmArguments, device: torch.device) -> None:
        self._target, self._horizon, self._device = algorithm.kl_target, algorithm.kl_horizon, device
        self.numbers = {} if self._target is None else {_COEF: algorithm.kl_coef}

    def applied_to(self, algorithm: AlgorithmArguments) -> AlgorithmArguments:
        """The flags with the current coefficient as --kl-coef."""
        return algorithm if self._target is None else dataclasses.replace(algorithm, kl_coef=self.numbers[_COEF])

    def after_rollout(self, metrics: dict[str, float], samples: int) -> None:
        """Notes the coefficient of a rollout of so many samples in its `metrics`, and moves it; collective."""
        if self._target is None:
            return
        coef = self.numbers[_COEF]
        metrics["rollout/kl_coef"] = coef
        # sums on a device may be rounded differently by each rank
        kl = torch.tensor(metrics["rollout/sample_kl"], dtype=torch.float64, device=self._device)
        dist.broadcast(kl, src=0)
        if not kl.isfinite():  # of a step that was skipped for that: the coefficient would never be finite again
            return
        moved = next_kl_coef(coef, float(kl), target=self._target, samples=samples, horizon=self._horizon)
        self.numbers[_COEF] = moved
