"""The table of all metrics: name lookup, combination of optimizer steps, and agreement with the page."""

import itertools
import math
import re
from pathlib import Path

import pytest

from slimrl.observability.metrics import Metric, axis_of, combine_steps, metric_of
from slimrl.observability.metrics.registry import METRICS, SECTIONS, markdown

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    path: path.read_text() for path in (ROOT / "slimrl").rglob("*.py") if path.parts[-2:] != ("metrics", "registry.py")
}


def test_single_step_round_trips_bit_for_bit():
    step = {"loss": 0.1 + 0.2, "anything": 1 / 3}
    assert combine_steps([step]) == step


def test_each_metric_is_combined_by_its_rule():
    steps = [
        {"loss": 1.0, "ratio_max_abs_diff": 0.5, "tokens": 10.0, "lr": 1e-5, "lr-pg_1": 1e-5, "own": 2.0},
        {"loss": 2.0, "ratio_max_abs_diff": 0.2, "tokens": 30.0, "lr": 3e-5, "lr-pg_1": 3e-5, "own": 4.0, "rare": 7.0},
    ]
    assert combine_steps(steps) == {
        "loss": 1.5,
        "ratio_max_abs_diff": 0.5,
        "tokens": 40.0,
        "lr": 3e-5,
        "lr-pg_1": 3e-5,
        "own": 3.0,
        "rare": 7.0,
    }


def test_nan_is_not_hidden_by_the_maximum():
    steps = [{"train_rollout_logprob_abs_diff_max": value} for value in (0.1, math.nan, 0.2)]
    assert math.isnan(combine_steps(steps)["train_rollout_logprob_abs_diff_max"])


def test_no_steps_give_no_metrics():
    assert combine_steps([]) == {}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("rollout/response_len/median", "rollout/response_len/{mean,median,max,min}"),
        ("rollout/response_len/mode", None),
        ("rollout/zero_std/count_0.5", "rollout/zero_std/count_<reward>"),
        ("eval/aime-2024-pass@16", "eval/<name>-pass@<k>"),
        ("eval/aime-2024", "eval/<name>"),
        ("memory/rank0_cuda_peak_gib", "memory/rank<r>_cuda_{allocated,peak,reserved,device_used}_gib"),
        ("train/my_own_loss", None),
    ],
)
def test_metric_is_found_by_its_pattern(name, row):
    found = metric_of(name, METRICS)
    assert (found and found.name) == row


def test_axes_follow_the_prefix():
    axes = {"train/loss": "train/step", "eval/math": "eval/step", "perf/total_time": "rollout/step"}
    assert {name: axis_of(name) for name in axes} == axes
    assert Metric("passrate/pass@<k>", "").axis == "rollout/step"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_row_is_found_by_its_names_and_not_shadowed(metric):
    assert {metric_of(name, METRICS).name for name in spelled_out(metric)} == {metric.name}


def test_every_row_has_a_description_and_is_unique():
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 80
    for metric in METRICS:
        assert metric.meaning
        assert re.fullmatch(r"[a-z_]+/.+", metric.name)


def test_page_is_generated_from_the_table():
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == markdown(), "python -m slimrl.observability.metrics.registry > docs/metrics.md"
    assert page.count("\n| `") >= sum(map(len, SECTIONS.values()))


def spelled_out(metric: Metric) -> list[str]:
    """Names of the row, with 1 for each placeholder."""
    parts = re.split(r"(\{[^}]*\}|<[^>]*>)", metric.name)
    choices = [part[1:-1].split(",") if part.startswith("{") else [re.sub(r"<.*>", "1", part)] for part in parts]
    return ["".join(words) for words in itertools.product(*choices)]
