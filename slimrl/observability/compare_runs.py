"""Comparison of several runs: a row each, mean and spread of runs that differ only in the seed, and one picture.

`report` calls it for more than one run; reads only summaries.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_ATTEMPT = re.compile(r"_attempt_\d+$")
_SEED_IN_NAME = re.compile(r"[-_.]?seed[-_=]?\d+|[-_.]s\d+$")
_COLOURS = ("#1f4e8c", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93", "#008b8b", "#8b4513", "#708090")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of one run; None if missing. `reward` is the mean of its last tenth of steps."""

    name: str
    group: str
    seed: str | None
    steps: int
    status: str
    rewards: tuple[list[int], list[float]]  # steps, and the mean reward of each
    evaluations: tuple[list[int], list[float]]  # steps done, and the mean over data sets
    reward: float | None
    best_reward: float | None
    before: float | None
    after: float | None
    best: float | None
    minutes: float
    step_seconds: float | None
    tokens_per_second: float | None

    @classmethod
    def of(cls, summary: dict[str, Any]) -> Outcome:
        """`minutes` are those of the steps, with their saves and evaluations: a start says nothing about a method."""
        name, steps = summary["run"]["name"], summary["steps"]
        rewards, evaluations = reward_curve(summary), evaluation_curve(summary)
        scores = evaluations[1]
        totals = [step["seconds"]["total"] for step in steps]
        extra = [step["seconds"].get(phase, 0.0) for step in steps for phase in ("save", "evaluate")]
        speeds = [step.get("perf/train_tokens_per_second") for step in steps]
        return cls(
            name=name,
            group=group_of(name),
            seed=seed_of(summary["run"]["command"]),
            steps=len(steps),
            status=summary["status"],
            rewards=rewards,
            evaluations=evaluations,
            reward=_mean(rewards[1][-max(len(rewards[1]) // 10, 1) :]),
            best_reward=max(rewards[1], default=None),
            before=summary["eval"]["before"],
            after=scores[-1] if scores else None,
            best=max(scores, default=None),
            minutes=(sum(totals) + sum(extra)) / 60,
            step_seconds=_mean(totals),
            tokens_per_second=_mean([speed for speed in speeds if speed is not None]),
        )


# heading, field of Outcome, digits behind the point
_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("reward", "reward", 3),
    ("best", "best_reward", 3),
    ("eval before", "before", 3),
    ("after", "after", 3),
    ("best", "best", 3),
    ("min", "minutes", 1),
    ("s/step", "step_seconds", 2),
    ("tokens/s", "tokens_per_second", 0),
)


def group_of(name: str) -> str:
    """The run's name without its seed and its attempt: runs that share it differ in the seed."""
    return _SEED_IN_NAME.sub("", _ATTEMPT.sub("", name)) or name


def seed_of(command: str) -> str | None:
    """The last `--seed` of a command line."""
    try:
        words = shlex.split(command)
    except ValueError:  # cut off
        return None
    given = [
        word.partition("=")[2] or following
        for word, following in zip(words, [*words[1:], ""], strict=True)
        if word.partition("=")[0] == "--seed"
    ]
    return given[-1] if given else None


def reward_curve(summary: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Steps with a reward, and the rewards."""
    known = [(step["step"], step["reward"]) for step in summary["steps"] if step["reward"] is not None]
    return [step for step, _ in known], [reward for _, reward in known]


def evaluation_curve(summary: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Steps done at each evaluation, and the mean over its data sets."""
    points = []
    for entry in summary["eval"]["history"]:
        scores = [score for score in entry["scores"].values() if score is not None]
        if scores:
            points.append((entry["step"], statistics.fmean(scores)))
    return [step for step, _ in points], [score for _, score in points]


def running_mean(values: list[float]) -> list[float]:
    """Mean over a tenth of the run on either side of each point."""
    reach = max(len(values) // 10, 1)
    return [statistics.fmean(values[max(i - reach, 0) : i + reach + 1]) for i in range(len(values))]


def groups(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Outcomes by group, in the order given."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.group, []).append(outcome)
    return found


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The table's cells: a row for each run and, below those of a group of several, their mean and spread.

    The spread is the standard deviation between the runs (n - 1).
    """
    table = []
    for group, members in groups(outcomes).items():
        for one in members:
            steps = str(one.steps) if one.status == "completed" else f"{one.steps} ({one.status})"
            cells = [_number(vars(one)[field], digits) for _, field, digits in _COLUMNS]
            table.append([one.name, one.seed or "-", steps, *cells])
        if len(members) > 1:
            cells = [_spread([vars(one)[field] for one in members], digits) for _, field, digits in _COLUMNS]
            table.append([f"{group}: mean of {len(members)}", "", "", *cells])
    return table


def print_comparison(outcomes: Sequence[Outcome], console: Console) -> None:
    """The table of `rows`."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in ("run", "seed", "steps", *(heading for heading, _, _ in _COLUMNS)):
        table.add_column(heading, justify="left" if heading == "run" else "right", overflow="fold")
    for cells in rows(outcomes):
        table.add_row(*cells, style="bold" if not cells[2] else None)
    console.print(table)


def save_picture(outcomes: Sequence[Outcome], path: str | Path) -> None:
    """Rewards and evaluations over the steps: a thin line for each run, a thick one for the mean of a group."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(12, 4.5), dpi=150, layout="constrained")
    rewards, evaluations = figure.subplots(1, 2)
    for number, (group, members) in enumerate(groups(outcomes).items()):
        colour = _COLOURS[number % len(_COLOURS)]
        for axes, curve, smooth in (
            (rewards, lambda one: one.rewards, running_mean),
            (evaluations, lambda one: one.evaluations, list),
        ):
            curves = [curve(one) for one in members]
            for steps, values in curves:
                axes.plot(steps, smooth(values), color=colour, linewidth=1, alpha=0.35 if len(members) > 1 else 1)
            steps, values = mean_curve(curves, smooth)
            label = f"{group} (mean of {len(members)})" if len(members) > 1 else members[0].name
            axes.plot(
                steps, values, color=colour, linewidth=2.2, label=label, marker="D" if axes is evaluations else ""
            )
    for axes, title in ((rewards, "reward of the rollouts, running mean"), (evaluations, "evaluation")):
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_xlabel("training step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="best")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def mean_curve(
    curves: Sequence[tuple[list[int], list[float]]], smooth: Callable[[list[float]], list[float]]
) -> tuple[list[int], list[float]]:
    """The mean of smoothed curves, at the steps that all of them have."""
    by_step = [dict(zip(steps, smooth(values), strict=True)) for steps, values in curves]
    shared = sorted(set.intersection(*(set(one) for one in by_step)))
    return shared, [statistics.fmean(one[step] for one in by_step) for step in shared]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _spread(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return _number(_mean(known), digits)
    return f"{statistics.fmean(known):.{digits}f} ± {statistics.stdev(known):.{digits}f}"
