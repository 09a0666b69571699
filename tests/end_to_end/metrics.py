"""Compares a run's metrics in every output with its summary and with the table of all metrics."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path

from slimrl.observability.metrics import axis_of, metric_of
from slimrl.observability.metrics.registry import METRICS
from tests.observability.wandb_file import rows

KEY = "0123456789abcdef0123456789abcdef01234567"
_OF_THE_STEP = {"step", "reward", "weight_version", "seconds", "memory", "optimizer_steps", "by_optimizer_step"}
_AXES = {"rollout/step", "train/step", "eval/step"}


def flags(port: int) -> dict[str, object]:
    """Flags that enable everything that is off by default."""
    return {
        "sglang_enable_metrics": True,
        "router_prometheus_port": free_port(),
        "use_tensorboard": True,
        "use_wandb": True,
        "wandb_mode": "offline",
        "wandb_key": KEY,
        "prometheus_port": port,
        "use_rollout_entropy": True,
        "get_mismatch_metrics": True,
        "log_passrate": True,
        "log_multi_turn": True,
        "log_correct_samples": True,
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def scrape(port: int) -> dict[str, float]:
    """Values by metric."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {sample.labels["metric"]: sample.value for family in families for sample in family.samples}


def targets(run_dir: Path) -> dict[str, list[str]]:
    """Names of the metrics that each target of the run's file_sd answers with, by job."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, list[str]] = {}
    for group in json.loads((run_dir / "prometheus.json").read_text()):
        for address in group["targets"]:
            url = f"http://{address}{group['labels']['__metrics_path__']}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                families = text_string_to_metric_families(answer.read().decode())
                found.setdefault(group["labels"]["job"], []).extend(family.name for family in families)
    return found


def in_charts(step: dict) -> dict[str, float]:
    """The scalars of a summary's step under the names used by the metric writers."""
    found = {"rollout/raw_reward": step["reward"]}
    for name, value in step.items():
        if name not in _OF_THE_STEP:
            found[name if "/" in name else f"train/{name}"] = value
    found |= {f"perf/{phase}_time": seconds for phase, seconds in step["seconds"].items()}
    return found | {f"memory/{name}": amount for name, amount in step["memory"].items()}


def of_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: {point.step: point.value for point in events.Scalars(name)} for name in events.Tags()["scalars"]}


def of_wandb(run_dir: Path) -> dict[str, dict[int, float]]:
    (file,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    found: dict[str, dict[int, float]] = {}
    for row in rows(file):
        (axis,) = _AXES & row.keys()
        for name, value in row.items():
            assert name == axis or axis_of(name) == axis, name
            found.setdefault(name, {})[row[axis]] = value
    return found


def assert_all_agree(run_dir: Path, summary: dict) -> None:
    """Asserts that all outputs have the same names and numbers, all listed in the table, and no key."""
    charts, kept = of_tensorboard(run_dir / "tensorboard"), of_wandb(run_dir)
    assert charts.keys() == kept.keys() - _AXES, charts.keys() ^ kept.keys()
    unknown = [name for name in kept if metric_of(name, METRICS) is None]
    assert not unknown, unknown
    for step in summary["steps"]:
        for name, value in in_charts(step).items():
            assert kept[name][step["step"]] == value, name
            assert abs(charts[name][step["step"]] - value) <= 1e-6 * abs(value), name
    for entry in summary["eval"]["history"]:
        for name, value in entry["scores"].items():
            assert kept[f"eval/{name}"][entry["step"]] == value
    for path in run_dir.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
