"""Step and evaluation lines on a terminal of 100 columns; the log file has them in full."""

import logging

import pytest

from slimrl.observability.run_log import RunLog, StepRecord, evaluation_words, step_line
from slimrl.observability.terminal import TERMINAL_WIDTH, setup_logging, short_evaluation, short_step
from tests.observability.test_run_log import Result

SECONDS = {"generate": 1.24, "train": 0.4, "update_weights": 0.1, "total": 1.8}


def line(step: int, rollout: dict[str, float], train: dict[str, float]) -> str:
    record = StepRecord(step, str(step), {"rollout/raw_reward": 0.60547, **rollout}, [train] * 2, SECONDS)
    return step_line(record, train, SECONDS, compares_groups=True)


USUAL = {"loss": -4.66e-10, "grad_norm": 0.4123, "kl_loss": 8.25e-4, "train_rollout_logprob_abs_diff_mean": 1.62e-7}
TROUBLE = {
    "rollout/zero_std/ratio": 1.0,
    "rollout/reward_failures": 12.0,
    "rollout/failed_samples": 3.0,
    "rollout/staleness/mean": 1.24,
    "rollout/staleness/max": 2.0,
    "rollout/staleness/dropped": 7.0,
}


@pytest.mark.parametrize(
    ("step", "rollout", "train", "expected"),
    [
        (
            12,
            {},
            USUAL,
            "step 12 | reward 0.6055 | loss -4.7e-10 | grad 0.41 | kl 0.00082 | diff 1.6e-07 | 1.8s",
        ),
        (
            12,
            {"rollout/failed_samples": 3.0},
            USUAL,
            "step 12 | reward 0.6055 | loss -4.7e-10 | grad 0.41 | diff 1.6e-07 | 3 FAILED | 1.8s",
        ),
        (3, {}, {}, "step 3 | reward 0.6055 | 1.8s"),
        (
            123456,
            TROUBLE,
            {**USUAL, "skipped": 2.0},
            "step 123456 | reward 0.6055 | SKIPPED 2 of 2 optimizer steps | NO SPREAD in any group | ...",
        ),
    ],
)
def test_step_line_fits_and_drops_numbers_before_warnings(step, rollout, train, expected):
    shown = short_step(line(step, rollout, train))
    assert shown == expected
    assert len("12:34:56 ") + len(shown) <= 100


SLOW_ONLY = {"generate": 0.01, "train": 0.4, "update_weights": 0.0, "total": 0.42}


@pytest.mark.parametrize(
    ("train", "full", "short"),
    [
        (
            {"loss": 1.7, "perplexity": 5.4739, "grad_norm": 0.4123, "tokens": 8192.0},
            "step 12 | loss 1.7 | ppl 5.47 | grad 0.412 | 8192 tokens | train 0.4s total 0.4s",
            "step 12 | loss 1.7 | ppl 5.47 | grad 0.41 | 8192 tokens | 0.4s",
        ),
        (
            {"loss": 0.51, "pair_accuracy": 0.9375, "reward_margin": 1.25, "grad_norm": 3.0, "tokens": 640.0},
            "step 12 | loss 0.51 | accuracy 0.938 | margin 1.25 | grad 3 | 640 tokens | train 0.4s total 0.4s",
            "step 12 | loss 0.51 | accuracy 0.938 | margin 1.25 | grad 3 | 640 tokens | 0.4s",
        ),
    ],
    ids=["SFT", "pairs"],
)
def test_supervised_step_line_has_no_reward_and_no_phase_without_time(train, full, short):
    record = StepRecord(12, "", {"rollout/raw_reward": 0.0}, [train], SLOW_ONLY)
    shown = step_line(record, train, SLOW_ONLY, supervised=True)
    assert shown == full
    assert short_step(shown) == short


def test_line_of_many_eval_datasets_has_their_scores_and_is_truncated():
    fits = "evaluation after 30 steps | addition 1 (5 tokens, 0% truncated)"
    assert short_evaluation(fits) == fits
    pairs = {"eval/held-out": 0.9375, "eval/held-out-loss": 0.2151, "eval/held-out-reward_margin": 1.5}
    assert evaluation_words("held-out", 0.9375, pairs) == "held-out 0.9375 (loss 0.215, margin 1.5)"
    many = " | ".join(["evaluation after 30 steps", *(f"set{n} 0.5 (pass@16 0.625, 812 tokens)" for n in range(4))])
    assert short_evaluation(many) == "evaluation after 30 steps | set0 0.5 | set1 0.5 | set2 0.5 | set3 0.5"
    assert len(short_evaluation(many * 5)) == TERMINAL_WIDTH


def test_terminal_gets_the_short_line_and_the_file_the_full_one(tmp_path, capsys):
    logger = logging.getLogger("slimrl")
    before = logger.level, logger.propagate
    file = setup_logging("INFO", tmp_path)
    try:
        with RunLog(tmp_path, versions={}) as log:
            record = StepRecord(0, "0", {"rollout/raw_reward": 0.5}, [USUAL], SECONDS)
            log.evaluation("before", 0, {"addition": Result(0.4)})
            log.step(record)
    finally:
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.level, logger.propagate = before
    evaluated, stepped = capsys.readouterr().err.splitlines()
    assert evaluated.endswith(" evaluation after 0 steps | addition 0.4 (0% truncated)")
    assert stepped.endswith(" step 0 | reward 0.5 | loss -4.7e-10 | grad 0.41 | kl 0.00082 | diff 1.6e-07 | 1.8s")
    assert file.read_text().endswith("| generate 1.2s train 0.4s update 0.1s total 1.8s | version 0\n")
