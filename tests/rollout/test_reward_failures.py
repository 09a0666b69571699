"""Answers without a score: reported in the log line, and too many of them end the run."""

import pytest

from slimrl.data.sample import Sample
from slimrl.observability.run_log import StepRecord, evaluation_words, step_line
from slimrl.rollout.rm_hub.scorer import TooManyGraderFailuresError, check_failure_rate


def samples(*reasons):
    return [Sample(prompt="q", metadata={} if reason is None else {"reward_failure": reason}) for reason in reasons]


def test_rollout_with_only_failures_ends_the_run_with_the_reasons():
    with pytest.raises(TooManyGraderFailuresError, match="rollout 7: grading failed on 3 of 3 responses") as caught:
        check_failure_rate(samples("slow", "died", "slow"), 1.0, "rollout 7")
    assert "(2 times: slow; 1 times: died)" in str(caught.value)


@pytest.mark.parametrize(("limit", "ends"), [(1.0, False), (0.5, True), (0.51, False), (0.01, True), (1.1, False)])
def test_failure_limit_is_the_fraction_that_ends_the_run(limit, ends):
    half = samples("slow", None, "slow", None)
    if ends:
        with pytest.raises(TooManyGraderFailuresError):
            check_failure_rate(half, limit, "rollout 0")
    else:
        check_failure_rate(half, limit, "rollout 0")


def test_no_failures_or_a_limit_above_one_never_end_the_run():
    check_failure_rate(samples(None, None), 0.01, "rollout 0")
    check_failure_rate(samples("slow", "slow"), 1.1, "rollout 0")


def test_step_and_evaluation_lines_report_grader_failures():
    def line(failures):
        rollout = {"rollout/raw_reward": 0.5, "rollout/reward_failures": failures}
        seconds = dict.fromkeys(("generate", "train", "update_weights", "total"), 1.0)
        return step_line(StepRecord(3, "3", rollout, [], seconds), {}, seconds)

    assert " | NO SCORE on 2 answers | " in line(2.0) and "VERDICT" not in line(0.0)
    assert evaluation_words("aime", 0.5, {"eval/aime-reward_failures": 4.0}) == "aime 0.5 (NO SCORE on 4 answers)"
    assert evaluation_words("aime", 0.5, {"eval/aime-reward_failures": 0.0}) == "aime 0.5"
