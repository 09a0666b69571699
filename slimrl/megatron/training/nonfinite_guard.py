"""Takes an optimizer step only if loss and gradient are finite, on every rank or on none.

A skipped step changes nothing: weights, moments, step counters, schedule and router biases stay the same, bit for bit.
The trainer calls it once per optimizer step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from torch import Tensor

from slimrl.arguments.flags.optimizer import OptimizerArguments
from slimrl.megatron.parallel import ParallelState

logger = logging.getLogger(__name__)

_SHOWN_SAMPLES = 8


class NonFiniteGuard:
    """Skips and counts bad steps. Call `begin` before backward, `step` after the reduction; collective, all ranks."""

    def __init__(
        self,
        flags: OptimizerArguments,
        optimizer: MegatronOptimizer,
        stages: Sequence[torch.nn.Module],
        parallel: ParallelState,
    ) -> None:
        self._ends_the_run = flags.check_for_nan_in_loss_and_grad
        self._most_in_a_row = flags.max_skipped_steps
        self._optimizer = optimizer
        self._parts = getattr(optimizer, "chained_optimizers", [optimizer])
        self._parallel = parallel
        # megatron-core updates these in the reduction, before it is known whether the step is taken
        self._biases = [
            buffer for stage in stages for name, buffer in stage.named_buffers() if name.endswith(".expert_bias")
        ]
        self._biases_before: list[Tensor] = []
        self._in_a_row = 0

    def begin(self) -> None:
        """Save the state that the backward pass itself changes."""
        self._biases_before = [bias.clone() for bias in self._biases]

    def step(self, loss: float, where: str, broken_inputs: Callable[[], list[str]]) -> tuple[bool, float]:
        """Whether the step was taken, and the gradient norm before clipping (NaN if it was not computed).

        `loss` is the step's, over all ranks; `where` names the step in messages; `broken_inputs` returns this rank's
        samples with non-finite inputs. With --fp16 an overflow that a smaller loss scale can fix only skips the step.
        Raises FloatingPointError for any other non-finite value, immediately or after --max-skipped-steps in a row.
        """
        scale = self._adaptive_scale()
        overflow, norm = False, math.nan
        if math.isfinite(loss) or not self._scales_loss():  # a smaller loss scale cannot fix a non-finite loss
            overflow = self._optimizer.prepare_grads()
            norm = math.inf if overflow else float(self._optimizer.get_grad_norm())
        if not self._on_any_rank(not (math.isfinite(loss) and math.isfinite(norm))):
            self._clip(norm)
            self._optimizer.step_with_ready_grads()
            self._in_a_row = 0
            return True, norm
        for bias, before in zip(self._biases, self._biases_before, strict=True):
            bias.copy_(before)
        if overflow and scale is not None:
            logger.info("%s: overflow with the loss scale %g; the step is skipped", where, scale)
        else:
            self._count(
                f"{where}: the loss is {loss:g} and the gradient norm is {norm:g}{self._blame(broken_inputs())}"
            )
        return False, norm

    def _count(self, what: str) -> None:
        self._in_a_row += 1
        if self._ends_the_run:
            raise FloatingPointError(
                f"{what}; the step was not taken. Resume from the last checkpoint with a lower"
                " --lr or without the samples of this rollout, or skip such steps with"
                " --no-check-for-nan-in-loss-and-grad"
            )
        if self._in_a_row >= self._most_in_a_row:
            raise FloatingPointError(
                f"{what}; {self._in_a_row} consecutive steps were not finite (--max-skipped-steps"
                f" {self._most_in_a_row}): the weights or the data are broken. Resume from an earlier checkpoint"
                " (--ckpt-step) with a lower --lr"
            )
        if self._parallel.rank == 0:
            logger.warning("%s: the step is skipped (%d in a row)", what, self._in_a_row)

    def _blame(self, broken_inputs: list[str]) -> str:
        """The samples of all ranks with non-finite inputs, as the end of a sentence."""
        of_ranks: list[list[str]] = [[] for _ in range(self._parallel.world_size)]
        dist.all_gather_object(of_ranks, broken_inputs)
        names = sorted({name for names in of_ranks for name in names})
        if not names:
            return ""
        more = f" and {len(names) - _SHOWN_SAMPLES} more" if len(names) > _SHOWN_SAMPLES else ""
        return f"; not finite before the step: {', '.join(names[:_SHOWN_SAMPLES])}{more}"

    def _scales_loss(self) -> bool:
        return any(_scaler(part) is not None for part in self._parts)

    def _adaptive_scale(self) -> float | None:
        """The loss scale if an overflow reduces it; None if it is fixed, at its minimum or absent."""
        scalers = [scaler for part in self._parts if isinstance(scaler := _scaler(part), DynamicGradScaler)]
        scales = [float(scaler.scale) for scaler in scalers if scaler.scale > scaler.min_scale]
        return min(scales, default=None)

    def _on_any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; should be equal on all, but replicas would diverge if it were not."""
        value = torch.tensor(int(flag), dtype=torch.int32, device=self._parallel.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value)

    def _clip(self, norm: float) -> None:
        for part in self._parts:
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(
                    parameters,
                    max_norm=part.config.clip_grad,
                    total_norm=norm,
                    use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )


def _scaler(part: MegatronOptimizer) -> object | None:
    """The loss scaler of an optimizer; only those of mixed precision may have one."""
    return part.grad_scaler if isinstance(part, MixedPrecisionOptimizer) else None


def broken_samples(columns: dict[str, Tensor], loss_mask: Tensor, lengths: Tensor, ids: Tensor) -> list[str]:
    """ "sample 12 (advantages)" for every sample with a trained token whose value is not finite.

    `columns` and `loss_mask` are float [response tokens], `lengths` and `ids` int64 [samples].
    """
    owners = torch.repeat_interleave(ids, lengths)
    trained = loss_mask.cpu() != 0
    return [
        f"sample {sample} ({name})"
        for name, values in columns.items()
        for sample in owners[trained & ~values.cpu().isfinite()].unique().tolist()
    ]
