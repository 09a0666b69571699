"""The trainer's report of a full rollout: against transformers' log-probabilities, one sample at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slimrl.observability.metrics import metric_of
from slimrl.observability.metrics.registry import METRICS
from tests.megatron import layouts, ranks, reference
from tests.megatron.layouts import SETTINGS, Layout


def report_of(rank: int, world_size: int, init_method: str, args: Any, rollout: Any) -> tuple[dict, list[dict]]:
    """The report and the steps' metrics of one rank."""
    trainer = ranks.start(rank, world_size, init_method, args)
    profiler = trainer._parts.profiler = EndsOfProfiles(trainer._parts.times)
    metrics = trainer.train(0, ranks.share_of(trainer, rollout))
    assert profiler.timed_before == {"train_log_probs": "log_probs", "train_actor": "actor_train"}
    trainer.close()
    return trainer.rollout_metrics, metrics


class EndsOfProfiles:
    """Replaces the profiler: when the file of a phase is written, its time has been read already."""

    def __init__(self, times: Any) -> None:
        self._times = times
        self.timed_before: dict[str, str] = {}

    @contextlib.contextmanager
    def part(self, target: str, rollout_id: int) -> Iterator[None]:
        yield
        if target != "train_overall":
            self.timed_before[target] = list(self._times._seconds)[-1]


@pytest.mark.slow
def test_means_over_all_ranks_match_transformers(four_ranks: Any, tmp_path: Any):
    models = layouts.Models(tmp_path)
    args = models.args(Layout(4, {"pipeline_model_parallel_size": 2}), "dense")
    args.use_rollout_entropy = args.log_correct_samples = args.get_mismatch_metrics = True
    args.normalize_advantages, args.compute_old_log_probs = True, "always"
    rollout = models.rollout
    rollout.raw_rewards = (rollout.rewards > 0).float()
    rollout.truncated[2] = True
    reports = four_ranks.run(report_of, args, rollout)
    report, metrics = reports[0]
    for other, _ in reports[1:]:
        assert {name: value for name, value in other.items() if "perf/" not in name} == {
            name: value for name, value in report.items() if "perf/" not in name
        }

    truth = by_hand(models, rollout)
    assert {name: value for name, value in report.items() if "perf/" not in name} == {
        name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in truth.items()
    }
    assert [metrics[0]["lr-pg_0"], metrics[0]["global_batch_size"]] == [metrics[0]["lr"], len(rollout) / 2]
    assert {name for name in report if "perf/" in name} == {
        "perf/data_preprocess_time",
        *(
            f"perf/{phase}_{unit}"
            for phase in ("log_probs", "ref_log_probs", "actor_train")
            for unit in ("time", "tflops")
        ),
        "perf/actor_train_tok_per_s",
    }
    speed = report["perf/actor_train_tok_per_s"] * report["perf/actor_train_time"]
    assert speed == pytest.approx(int(rollout.total_lengths.sum()))
    work = {
        phase: report[f"perf/{phase}_tflops"] * report[f"perf/{phase}_time"] for phase in ("log_probs", "actor_train")
    }
    assert work["actor_train"] == pytest.approx(3 * work["log_probs"])
    names = [name if "/" in name else f"train/{name}" for name in (*report, *metrics[0])]
    assert [name for name in names if metric_of(name, METRICS) is None] == []


OF_EVERY_SAMPLE = ("rollout/rewards", "rollout/truncated", "rollout/response_lengths", "rollout/total_lengths")


def by_hand(models: layouts.Models, rollout: Any) -> dict[str, float]:
    """The report's means in float64, sample by sample."""
    policy, other = (reference.load_model(models.folder("dense", 2, role)) for role in ("policy", "reference"))
    columns: dict[str, list[float]] = {}
    start = 0
    everything, masks = rollout.rewards.repeat_interleave(rollout.response_lengths).double(), rollout.loss_mask > 0
    whitened = (everything - everything[masks].mean()) / everything[masks].std()
    for row, sample in enumerate(reference._split(rollout)):
        with torch.no_grad():
            ours, entropy, _ = reference._log_probs(policy, sample, SETTINGS.temperature)
            theirs, _, _ = reference._log_probs(other, sample, SETTINGS.temperature)
        length, mask = sample["mask"].numel(), sample["mask"]
        engine, advantage = (
            column[start : start + length].double() for column in (rollout.rollout_log_probs, whitened)
        )
        start += length

        def mean(values: torch.Tensor, mask: torch.Tensor = mask) -> float:
            return float((values * mask).sum() / mask.sum().clamp(min=1))

        gap, drift = ours - theirs, ours - engine
        values = {
            "rollout/log_probs": mean(ours),
            "rollout/ref_log_probs": mean(theirs),
            "rollout/rollout_log_probs": mean(engine),
            "rollout/kl": mean((-gap).exp() - 1 + gap),
            "rollout/entropy": mean(entropy),
            "rollout/advantages": mean(advantage),
            "rollout/returns": mean(sample["reward"].expand(length)),
            "rollout/rewards": float(sample["reward"]),
            "rollout/truncated": float(row == 2),
            "rollout/response_lengths": float(length),
            "rollout/total_lengths": float(rollout.total_lengths[row]),
            "mismatch_kl": -mean(drift),
            "mismatch_k3_kl": mean(drift.exp() - 1 - drift),
            "mismatch_training_ppl": float(torch.tensor(-mean(ours)).exp()),
            "mismatch_rollout_ppl": float(torch.tensor(-mean(engine)).exp()),
            "mismatch_log_ppl_abs_diff": abs(mean(ours) - mean(engine)),
        }
        if rollout.raw_rewards[row] >= 1:
            values["rollout/correct_entropy"] = values["rollout/entropy"]
        for name, value in values.items():
            if bool(mask.any()) or name in OF_EVERY_SAMPLE:  # a fully masked sample has no mean over tokens
                columns.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in columns.items()}


def test_phase_times_are_summed_and_reset_when_read():
    from slimrl.megatron.training.train_metrics import PhaseTimes

    times = PhaseTimes(torch.device("cpu"))
    started = time.perf_counter()
    for _ in range(2):
        with times.phase("log_probs"):
            time.sleep(0.01)
    whole = time.perf_counter() - started
    taken = times.take()
    assert 0.02 <= taken["log_probs"] <= whole
    assert times.take() == {}
