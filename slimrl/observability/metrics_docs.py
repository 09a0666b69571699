"""docs/metrics.md as text: `python -m slimrl.observability.metrics_docs > docs/metrics.md`.

Made from the table, so it cannot name what the table does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from slimrl.observability.metrics import Metric
from slimrl.observability.metrics.registry import SECTIONS, TRAIN

_INTRODUCTION = """\
# Metrics

Every number that a run reports, under the same name in [TensorBoard, W&B and Prometheus](observability.md) and in
`steps[]` of [`summary.json`](summary.md) (there the names of `train/` stand without it, `memory/` is an object of its
own, and the times of phases are in `seconds`). This page is made from the table in the source:
`python -m slimrl.observability.metrics_docs > docs/metrics.md`.

- `{a,b}` stands for one of these words, `<x>` for a name or number of the run.
- *when* is empty where every run reports it. A share is between 0 and 1.
- What functions of your own report (a loss, a log function, a rollout function) is passed on under its own name.

## Horizontal axes

| names | axis | its number |
| --- | --- | --- |
| `train/` | `train/step` | optimizer steps before this one; where a rollout has several, each is a point of its own |
| `eval/` | `eval/step` | rollouts trained on before the evaluation |
| all others | `rollout/step` | the rollout, from 0 |

With `--wandb-always-use-train-step` all three count optimizer steps, also in TensorBoard. `summary.json` has one entry
per rollout; the column *combined* of the first table says how several optimizer steps become one number there, and
`by_optimizer_step` holds each of them.
"""
_NAMES_FROM_SLIME = """
## Names of slime that are different here

| slime | here |
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
