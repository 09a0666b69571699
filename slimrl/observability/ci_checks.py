"""Checks the metrics of each optimizer step, and ends the run if they are implausible (`--ci-test`).

Also keeps gradient norms and compares with kept ones (`--ci-save-grad-norm`, `--ci-load-grad-norm`). Lives in the
driver; called after each rollout's training.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from slimrl.arguments import Arguments
from slimrl.processes.files import atomic_file

KL_TOLERANCE = 1e-5  # the same weights, asked twice: rounding alone
GRAD_NORM_TOLERANCE = 0.01
_DIFFERENCE = "train_rollout_logprob_abs_diff_mean"


class RunCheckError(RuntimeError):
    """A training metric violates its bound; the message has its name, value and bound."""


@dataclasses.dataclass(frozen=True)
class RunChecks:
    """The flags of the checks; `fresh` is true where training begins with the reference's own weights."""

    enabled: bool
    with_kl: bool
    fresh: bool
    largest_difference: float
    save_grad_norm: str | None
    load_grad_norm: str | None

    @classmethod
    def from_args(cls, args: Arguments, start: int) -> RunChecks:
        """`start` is the first rollout of the run."""
        return cls(
            enabled=args.ci_test,
            with_kl=not args.ci_disable_kl_checker and not args.use_rollout_logprobs,
            fresh=start == 0 and args.load is None,
            largest_difference=args.ci_train_rollout_logprob_abs_diff_threshold,
            save_grad_norm=args.ci_save_grad_norm,
            load_grad_norm=args.ci_load_grad_norm,
        )

    def check(self, rollout_id: int, steps: Sequence[dict[str, float]]) -> None:
        """`steps` are the training metrics of a rollout's optimizer steps. Raises RunCheckError.

        With `--ci-test` every number is finite and engines and training agree within the threshold. Before a rollout's
        first optimizer step the policy is the one that its log-probabilities were computed with, so that all ratios
        are 1; before the run's first step it is the reference, and the KL loss 0.
        """
        for number, step in enumerate(steps):
            where = f"rollout {rollout_id}, optimizer step {number}"
            if self.enabled:
                self._check_finite(step, where)
                self._at_most(step, _DIFFERENCE, self.largest_difference, where)
                if self.with_kl and number == 0:
                    self._at_most(step, "ratio_max_abs_diff", KL_TOLERANCE, where)
                    if self.fresh and rollout_id == 0:
                        self._at_most(step, "kl_loss", KL_TOLERANCE, where)
            for role, name in (("actor", "grad_norm"), ("critic", "critic-grad_norm")):
                if name in step:
                    self._grad_norm(step[name], role, rollout_id, number, where)

    def _check_finite(self, step: dict[str, float], where: str) -> None:
        broken = [f"{name} {value}" for name, value in step.items() if not math.isfinite(value)]
        if broken:
            raise RunCheckError(f"--ci-test, {where}: {', '.join(broken)} must be finite")

    def _at_most(self, step: dict[str, float], name: str, bound: float, where: str) -> None:
        if name in step and abs(step[name]) > bound:
            raise RunCheckError(f"--ci-test, {where}: {name} is {step[name]:.3g} and must be at most {bound:g}")

    def _grad_norm(self, norm: float, role: str, rollout_id: int, step_id: int, where: str) -> None:
        if self.save_grad_norm is not None and _has_role(self.save_grad_norm, role):
            path = _filled(self.save_grad_norm, role, rollout_id, step_id)
            with atomic_file(path) as unfinished:
                unfinished.write_text(repr(norm) + "\n")
        if self.load_grad_norm is not None and _has_role(self.load_grad_norm, role):
            path = _filled(self.load_grad_norm, role, rollout_id, step_id)
            kept = _kept_norm(path)
            if not math.isclose(norm, kept, rel_tol=GRAD_NORM_TOLERANCE):
                raise RunCheckError(
                    f"{where}: the gradient norm is {norm:.6g} and {path} has {kept:.6g}, over 1 % away"
                )


def _has_role(template: str, role: str) -> bool:
    """A template without `{role}` is for the policy alone."""
    return role == "actor" or "{role}" in template


def _filled(template: str, role: str, rollout_id: int, step_id: int) -> Path:
    values = {"{role}": role, "{rollout_id}": str(rollout_id), "{step_id}": str(step_id)}
    for name, value in values.items():
        template = template.replace(name, value)
    return Path(template)


def _kept_norm(path: Path) -> float:
    try:
        return float(path.read_text())
    except (OSError, ValueError) as error:
        raise RunCheckError(f"--ci-load-grad-norm {path} holds no gradient norm ({error}): check the path") from error
