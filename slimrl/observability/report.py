"""`python -m slimrl.observability.report runs/<name>`: the results of a run as tables, a terminal plot and a picture.

Reads only `summary.json`, also during the run. Several runs are compared in one table and one picture: a row each, mean
and spread of runs that differ only in the seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimrl.observability.summary import load_summary, next_commands, outcome_line, shown_path
from slimrl.observability.terminal import text_chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

_CHART_WIDTH, _CHART_HEIGHT = 76, 14
_MIN_POINTS_FOR_TREND = 10
_PICTURE = "comparison.png"  # default file for several runs
_FAULTS = {  # handled failures by the name of their count
    "rollout/faults/servers_lost": "servers lost",
    "rollout/faults/servers_replaced": "servers replaced",
    "rollout/faults/router_restarts": "router restarts",
    "rollout/faults/ranks_lost": "training ranks lost",
    "rollout/faults/requests_resent": "requests sent again",
    "rollout/failed_samples": "failed samples dropped",
    "rollout/staleness/dropped": "stale groups regenerated",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report and draw the picture if requested; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m slimrl.observability.report", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", help="folder of a run, or its summary.json; several are compared")
    parser.add_argument(
        "--png", help=f"also draw the reward curve into this file (for several runs always, default {_PICTURE})"
    )
    parser.add_argument("--model", help="Hugging Face folder of the trained model, for the last line")
    options = parser.parse_args(argv)
    try:
        summaries = [load_summary(path) for path in options.runs]
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if len(summaries) > 1:
        compare_runs(summaries, options.png or _PICTURE)
        return 0
    (summary,) = summaries
    print_report(summary)
    if options.png:
        save_png(summary, options.png)
        print(f"the reward curve is in {shown_path(options.png)}\n")
    print("\n".join([outcome_line(summary), *next_commands(summary, options.model)]))
    return 0


def compare_runs(summaries: Sequence[dict[str, Any]], picture: str) -> None:
    """The table of several runs, and their curves in `picture`."""
    from rich.console import Console

    outcomes = [Outcome.of(summary) for summary in summaries]
    print_comparison(outcomes, Console())
    save_picture(outcomes, picture)
    print(f"the curves of {len(outcomes)} runs are in {shown_path(picture)}")


def print_report(summary: dict[str, Any], console: Console | None = None) -> None:
    """Tables of the results, the seconds and the paths, and the reward per step as a text plot."""
    from rich.console import Console

    console = console or Console()
    state = summary["status"] + (f": {summary['error']}" if summary["error"] else "")
    console.print(
        f"run {summary['run']['name']}: {len(summary['steps'])} steps, {state}", markup=False, highlight=False
    )
    results = _results_table(summary)
    if results.row_count:
        console.print(results)
    if summary["steps"]:
        print_chart(summary, console)
        console.print(_seconds_table(summary))
        if any(step.get("memory") for step in summary["steps"]):
            console.print(_memory_table(summary))
    console.print(_paths_table(summary))


def print_chart(summary: dict[str, Any], console: Console) -> None:
    """The reward per step as a line, the evaluations as diamonds."""
    points, marks = zip(*reward_curve(summary), strict=True), zip(*evaluation_curve(summary), strict=True)
    legend = "reward per step" + ("  (◆ evaluation)" if summary["eval"]["history"] else "")
    chart = text_chart(list(points), list(marks), width=_CHART_WIDTH, height=_CHART_HEIGHT)
    console.print(f"{legend}\n{chart}\n", markup=False, highlight=False, no_wrap=True)


def save_png(summary: dict[str, Any], path: str | Path) -> None:
    """The reward per step with its running mean, and the evaluations, as a picture of 1600 x 900 pixels."""
    from matplotlib.figure import Figure

    steps, rewards = reward_curve(summary)
    figure = Figure(figsize=(8, 4.5), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, rewards, color="#9db7d5", linewidth=1.2, marker=".", markersize=4, label="reward of the rollout")
    if len(steps) >= _MIN_POINTS_FOR_TREND:
        axes.plot(steps, running_mean(rewards), color="#1f4e8c", linewidth=2.2, label="running mean")
    eval_steps, scores = evaluation_curve(summary)
    if eval_steps:
        axes.plot(eval_steps, scores, "D", color="#d1495b", markersize=7, label="evaluation", zorder=3, clip_on=False)
        for step, score in zip(eval_steps, scores, strict=True):
            axes.annotate(
                f"{score:.2f}", (step, score), xytext=(0, -16), textcoords="offset points", ha="center", color="#d1495b"
            )
    axes.set_ylabel("mean reward")
    axes.margins(y=0.12)  # room for the numbers below the diamonds
    _finish(axes, f"slimrl: {summary['run']['name']}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, name in enumerate(columns):
        table.add_column(name, justify="left" if position == 0 else "right", overflow="fold")
    return table


def _results_table(summary: dict[str, Any]) -> Table:
    table = _table("result", "before", "after")
    for name, scores in summary["eval"]["datasets"].items():
        table.add_row(f"evaluation {name}", _number(scores["before"]), _number(scores["after"]))
    steps, rewards = reward_curve(summary)
    if steps:
        table.add_row("reward of the rollouts (first, last)", _number(rewards[0]), _number(rewards[-1]))
    gaps = [step.get("train_rollout_logprob_abs_diff_max") for step in summary["steps"]]
    gaps = [gap for gap in gaps if gap is not None]
    if gaps:
        table.add_row("largest |train - rollout logprob|", "", f"{max(gaps):.1e}")
    for name, whose in (("skipped", ""), ("critic-skipped", " of the critic")):
        if skipped := sum(step.get(name) or 0 for step in summary["steps"]):
            table.add_row(f"optimizer steps{whose} skipped (not finite)", "", f"{skipped:g}")
    ages = [step["rollout/staleness/mean"] for step in summary["steps"] if "rollout/staleness/mean" in step]
    if ages and (oldest := max(step.get("rollout/staleness/max") or 0 for step in summary["steps"])):
        table.add_row(
            "staleness of the samples in rollouts (mean, largest)", f"{statistics.fmean(ages):.2f}", f"{oldest:g}"
        )
    for name, words in _FAULTS.items():
        if count := sum(step.get(name) or 0 for step in summary["steps"]):
            table.add_row(words, "", f"{count:g}")
    return table


def _memory_table(summary: dict[str, Any]) -> Table:
    """The memory of every process after its first step, after its last, and at its peak."""
    table = _table("memory (GiB)", "first", "last", "peak")
    by_step = [step.get("memory") or {} for step in summary["steps"]]
    for name in dict.fromkeys(name for memory in by_step for name in memory):
        amounts = [memory[name] for memory in by_step if memory.get(name) is not None]
        shown = name.removesuffix("_gib").removesuffix("_rss").replace("_", " ")
        table.add_row(shown, f"{amounts[0]:.3f}", f"{amounts[-1]:.3f}", f"{max(amounts):.3f}")
    return table


def _seconds_table(summary: dict[str, Any]) -> Table:
    table = _table("phase", "seconds per step", "seconds in all")
    phases = dict.fromkeys(name for step in summary["steps"] for name in step["seconds"])
    for phase in [*(name for name in phases if name != "total"), "total"]:
        seconds = [step["seconds"].get(phase, 0.0) for step in summary["steps"]]
        table.add_row(phase.replace("_", " "), f"{statistics.fmean(seconds):.2f}", f"{sum(seconds):.1f}")
    return table


def _paths_table(summary: dict[str, Any]) -> Table:
    table = _table("what", "where")
    table.columns[1].justify = "left"
    for name, path in summary["paths"].items():
        table.add_row(name.replace("_", " "), shown_path(path))
    return table


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _finish(axes: Axes, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")


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
    table = _table("run", "seed", "steps", *(heading for heading, _, _ in _COLUMNS))
    for cells in rows(outcomes):
        table.add_row(*cells, style="bold" if not cells[2] else None)
    console.print(table)


def save_picture(outcomes: Sequence[Outcome], path: str | Path) -> None:
    """Rewards and evaluations over the steps: a thin line for each run, a thick one for the mean of a group."""
    from matplotlib.figure import Figure

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
        _finish(axes, title)
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


def _spread(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return _number(_mean(known), digits)
    return f"{statistics.fmean(known):.{digits}f} ± {statistics.stdev(known):.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
