"""Invalid numbers end a run with one error, and gradient norms are stored and compared."""

from __future__ import annotations

import math

import pytest

from slimrl.observability.ci_checks import RunCheckError, RunChecks

STEP = {
    "loss": 0.0,
    "grad_norm": 0.25,
    "kl_loss": 0.0,
    "ratio_max_abs_diff": 0.0,
    "train_rollout_logprob_abs_diff_mean": 0.01,
}


def checks(**changes) -> RunChecks:
    values = {"enabled": True, "with_kl": True, "fresh": True, "largest_difference": 0.1}
    return RunChecks(**{**values, "save_grad_norm": None, "load_grad_norm": None, **changes})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"train_rollout_logprob_abs_diff_mean": 0.2},
            "train_rollout_logprob_abs_diff_mean is 0.2 and must be at most",
        ),
        ({"ratio_max_abs_diff": 0.01}, "ratio_max_abs_diff is 0.01 and must be at most 1e-05"),
        ({"kl_loss": -0.01}, "kl_loss is -0.01 and must be at most 1e-05"),
        ({"loss": math.nan}, "loss nan must be finite"),
    ],
)
def test_mismatch_in_the_first_step_ends_the_run(change, sentence):
    checks().check(0, [STEP])
    with pytest.raises(RunCheckError, match=f"--ci-test, rollout 0, optimizer step 0: {sentence}"):
        checks().check(0, [STEP | change])
    checks(enabled=False).check(0, [STEP | change])


def test_later_steps_may_drift_but_engines_and_trainer_must_agree():
    moved = STEP | {"ratio_max_abs_diff": 0.3, "kl_loss": 0.2}
    checks().check(0, [STEP, moved])
    checks().check(5, [STEP | {"kl_loss": 0.2}])  # from the first rollout on, no longer the reference
    checks(fresh=False).check(0, [STEP | {"kl_loss": 0.2}])
    checks(with_kl=False).check(0, [moved])
    with pytest.raises(RunCheckError, match="rollout 5, optimizer step 1: train_rollout_logprob"):
        checks().check(5, [STEP, moved | {"train_rollout_logprob_abs_diff_mean": 0.11}])


def test_gradient_norms_are_written_exactly_and_compared_within_one_percent(tmp_path):
    template = str(tmp_path / "norms/{role}_{rollout_id}_{step_id}.txt")
    norms = [1 / 3, 2 / 3]
    off = {"enabled": False, "with_kl": False}
    checks(**off, save_grad_norm=template).check(7, [STEP | {"grad_norm": norm} for norm in norms])
    assert [float((tmp_path / f"norms/actor_7_{step}.txt").read_text()) for step in (0, 1)] == norms
    compare = checks(**off, load_grad_norm=template)
    compare.check(7, [STEP | {"grad_norm": norm * 1.009} for norm in norms])
    with pytest.raises(RunCheckError, match="optimizer step 1: the gradient norm is 0.68 and .* has 0.666667"):
        compare.check(7, [STEP | {"grad_norm": norms[0]}, STEP | {"grad_norm": 0.68}])
    with pytest.raises(RunCheckError, match="holds no gradient norm"):
        compare.check(8, [STEP])
