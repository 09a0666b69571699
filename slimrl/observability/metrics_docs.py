"""Generates docs/metrics.md from the table: `python -m slimrl.observability.metrics_docs > docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Sequence

from slimrl.observability.metrics import Metric
from slimrl.observability.metrics.registry import SECTIONS, TRAIN

_INTRODUCTION = """\
# Metrics

Every number that a run reports, under the same name in [TensorBoard, W&B and Prometheus](observability.md) and in
`steps[]` of [`summary.json`](summary.md) (there without the prefix `train/`, with `memory/` as a separate object, and
with the times of phases in `seconds`). This page is generated from the table in the source:
`python -m slimrl.observability.metrics_docs > docs/metrics.md`.

- `{a,b}` means one of these words, `<x>` a name or number of the run.
- *when* is empty if every run reports the metric. A fraction is between 0 and 1.
- Metrics of custom functions (a loss, a log function, a rollout function) keep their own names.

## Horizontal axes

| names | axis | value |
| --- | --- | --- |
| `train/` | `train/step` | optimizer steps before this one; each step of a rollout is a separate point |
| `eval/` | `eval/step` | rollouts trained on before the evaluation |
| all others | `rollout/step` | the rollout, from 0 |

With `--wandb-always-use-train-step` all three count optimizer steps, also in TensorBoard. `summary.json` has one entry
per rollout; the column *combined* of the first table says how it combines several optimizer steps into one number, and
`by_optimizer_step` has each of them.
"""
_NAMES_FROM_SLIME = """
## Names that differ from slime

| slime | slimrl |
| --- | --- |
| `train/train_rollout_logprob_abs_diff` | `train/train_rollout_logprob_abs_diff_mean`, `..._max` |
| `train/ois` | `train/ratio_mean` |
| `perf/sleep_time`, `perf/wake_up_time` | `perf/park_training_time`, `perf/wake_training_time` |
| `perf/save_model_time` | `perf/save_time` |
| `rollout/raw_reward` of the train ranks | the same name: it is computed once, with the rollout |
"""


def markdown() -> str:
    """The whole page."""
    return _INTRODUCTION + "".join(_section(title, rows) for title, rows in SECTIONS.items()) + _NAMES_FROM_SLIME


def _section(title: str, rows: Sequence[Metric]) -> str:
    heads = ["name", "meaning", "unit", *(["combined"] if rows is TRAIN else []), "when"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for metric in rows:
        combined = [metric.combine] if rows is TRAIN else []
        lines.append(_line([f"`{metric.name}`", metric.meaning, metric.unit, *combined, metric.when]))
    return f"\n## {title}\n\n" + "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(markdown(), end="")
