"""`python -m slimrl.observability.report runs/<name>`: the results of a run as tables, a terminal plot and a picture.

Reads only `summary.json`, also during the run. Several runs are compared in one table and one picture.
`text_chart` draws the plot with braille dots for the line and a sign for single points.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimrl.observability.compare_runs import (
    Outcome,
    evaluation_curve,
    print_comparison,
    reward_curve,
    running_mean,
    save_picture,
)
from slimrl.observability.summary import load_summary, next_commands, outcome_line, shown_path

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


# Dot (column, row) of a braille cell -> bit of its code point (Unicode 11.0, chapter 21.1).
_BRAILLE_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE_BLANK = 0x2800
_LABEL_WIDTH = 7
Points = Sequence[tuple[float, float]]


def text_chart(line: Points, marks: Points = (), *, width: int = 70, height: int = 14, mark: str = "◆") -> str:
    """`line` as a connected curve with `marks` on top, in `height` rows of at most `width` characters plus the axes.

    Empty if there are no points.
    """
    points = [*line, *marks]
    if not points:
        return ""
    left, right = _range([x for x, _ in points])
    low, high = _range([y for _, y in points])
    columns, rows = (width - _LABEL_WIDTH - 2) * 2, height * 4

    def dot(x: float, y: float) -> tuple[int, int]:
        return round((x - left) / (right - left) * (columns - 1)), round((high - y) / (high - low) * (rows - 1))

    cells = [[0] * (columns // 2) for _ in range(height)]
    dots = [dot(x, y) for x, y in line]
    for start, end in zip(dots, dots[1:] or dots, strict=False):
        for column, row in _between(start, end):
            cells[row // 4][column // 2] |= _BRAILLE_BITS[column % 2][row % 4]
    canvas = [[chr(_BRAILLE_BLANK + bits) if bits else " " for bits in row] for row in cells]
    for x, y in marks:
        column, row = dot(x, y)
        canvas[row // 4][column // 2] = mark

    middle = height // 2
    labels = {0: high, middle: high - (high - low) * (middle * 4 + 2) / rows, height - 1: low}
    text = []
    for row, characters in enumerate(canvas):
        label, axis = (_label(labels[row]), "┤") if row in labels else ("", "│")
        text.append(f"{label:>{_LABEL_WIDTH}} {axis}{''.join(characters)}")
    indent = " " * (_LABEL_WIDTH + 1)
    first, last = f"{left:g}", f"{right:g}"
    text.append(f"{indent}└{'─' * (columns // 2)}")
    text.append(f"{indent} {first}{last:>{columns // 2 - len(first)}}")
    return "\n".join(row.rstrip() for row in text)


def _range(values: list[float]) -> tuple[float, float]:
    """Lowest and highest value, widened if they are equal."""
    low, high = min(values), max(values)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Dots of the straight line, both ends included."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (round(start[0] + (end[0] - start[0]) * i / steps), round(start[1] + (end[1] - start[1]) * i / steps))
        for i in range(steps + 1)
    ]


def _label(value: float) -> str:
    return f"{value:.3g}"


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
    from matplotlib.ticker import MaxNLocator

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
    axes.set_title(f"slimrl: {summary['run']['name']}", loc="left", fontweight="bold")
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.12)  # room for the numbers below the diamonds
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
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


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
