"""Several optimizer steps of one rollout become one entry; the docs list every name."""

import math
from pathlib import Path

from slimrl.observability.metrics import TRAIN_METRICS, combine_steps

ROOT = Path(__file__).resolve().parents[2]


def test_a_single_step_comes_back_bit_for_bit():
    step = {"loss": 0.1 + 0.2, "anything": 1 / 3}
    assert combine_steps([step]) == step


def test_each_name_combines_by_its_rule():
    steps = [
        {"loss": 1.0, "ratio_max_abs_diff": 0.5, "tokens": 10.0, "lr": 1e-5, "own": 2.0},
        {"loss": 2.0, "ratio_max_abs_diff": 0.2, "tokens": 30.0, "lr": 3e-5, "own": 4.0, "rare": 7.0},
    ]
    assert combine_steps(steps) == {
        "loss": 1.5,
        "ratio_max_abs_diff": 0.5,
        "tokens": 40.0,
        "lr": 3e-5,
        "own": 3.0,
        "rare": 7.0,
    }


def test_a_nan_is_not_hidden_by_the_maximum():
    steps = [{"train_rollout_logprob_abs_diff_max": value} for value in (0.1, math.nan, 0.2)]
    assert math.isnan(combine_steps(steps)["train_rollout_logprob_abs_diff_max"])


def test_no_steps_give_no_metrics():
    assert combine_steps([]) == {}


def test_the_docs_say_what_every_name_means():
    text = (ROOT / "docs" / "summary.md").read_text()
    for name, metric in TRAIN_METRICS.items():
        meaning = metric.meaning.replace("|", r"\|")
        assert f"| `{name}` | {meaning} | {metric.combine} |" in text, name
