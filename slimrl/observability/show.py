"""`python -m slimrl.observability.show dump.jsonl`: prints a rollout dump in readable form."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from slimrl.data.sample import Sample, format_spans
from slimrl.observability.rollout_dump import RolloutDump, read_dump
from slimrl.observability.viewer import prompt_text, reward_text

_REWARD_WIDTH = 32  # characters


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table of all samples, then the chosen ones in full; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m slimrl.observability.show", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("dump", help="file written with --save-debug-rollout-data")
    parser.add_argument(
        "--sample", type=int, action="append", default=[], help="index to print in full; may be repeated"
    )
    parser.add_argument("--limit", type=int, default=3, help="samples printed in full where none is named (3)")
    parser.add_argument(
        "--chars", type=int, default=2000, help="characters kept of each text, end and beginning (2000)"
    )
    parser.add_argument("--reward-key", help="the entry in the table where rewards are dicts (the one of the run)")
    options = parser.parse_args(argv)
    try:
        dump = read_dump(options.dump)
        chosen = _choose(dump.samples, options.sample, options.limit)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    _print(dump, chosen, options.chars, options.reward_key)
    return 0


def _choose(samples: list[Sample], indices: list[int], limit: int) -> list[Sample]:
    if not indices:
        return samples[:limit]
    by_index = {sample.index: sample for sample in samples}
    missing = [index for index in indices if index not in by_index]
    if missing:
        raise ValueError(f"no sample {missing[0]} in this dump: it has {', '.join(str(index) for index in by_index)}")
    return [by_index[index] for index in indices]


def _print(dump: RolloutDump, chosen: list[Sample], chars: int, reward_key: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    kind = "evaluation" if dump.header["evaluation"] else "rollout"
    table = Table(title=f"{kind} {dump.header['rollout_id']}: {len(dump.samples)} samples", title_justify="left")
    for name in ("sample", "group", "status", "reward", "prompt", "response", "mean logprob", "weights"):
        if name == "reward":  # a dict leaves room for the others
            table.add_column(name, no_wrap=True, max_width=_REWARD_WIDTH)
        else:
            table.add_column(name, justify="left" if name == "status" else "right")
    for sample, key in zip(dump.samples, dump.reward_keys(), strict=True):
        table.add_row(*_row(sample, reward_key or key))
    console.print(table)
    for sample in chosen:
        _print_sample(console, sample, chars)


def _row(sample: Sample, reward_key: str | None) -> list[str]:
    log_probs = sample.rollout_log_probs
    return [
        str(sample.index),
        str(sample.group_index),
        sample.status.value + (" (removed)" if sample.remove_sample else ""),
        _reward(sample, reward_key),
        str(sample.prompt_length),
        str(sample.response_length),
        f"{statistics.fmean(log_probs):.3f}" if log_probs else "",
        ",".join(dict.fromkeys(sample.weight_versions)),
    ]


def _reward(sample: Sample, reward_key: str | None) -> str:
    value = sample.reward.get(reward_key or "") if isinstance(sample.reward, dict) else sample.reward
    return f"{value:g}" if isinstance(value, int | float) else reward_text(sample)


def _print_sample(console: object, sample: Sample, chars: int) -> None:
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.text import Text

    assert isinstance(console, Console)
    # Text, not markup: a response may well hold square brackets.
    parts = [Text(_shorten(prompt_text(sample), chars), style="dim"), Text(_shorten(sample.response, chars))]
    if sample.label is not None:
        parts.append(Text(f"label: {sample.label}", style="dim"))
    if len(sample.version_spans) > 1:
        parts.append(Text(f"weights: {format_spans(sample.version_spans)}", style="dim"))
    reward = ""
    if isinstance(sample.reward, dict):  # as long as it may be
        parts.append(Text(f"reward: {reward_text(sample)}", style="dim"))
    else:
        reward = f"reward {_reward(sample, None)} | "
    title = Text(f"sample {sample.index} | {reward}{sample.status.value}")
    console.print(Panel(Group(*parts), title=title, title_align="left"))


def _shorten(text: str, chars: int) -> str:
    """The beginning and the end: the answer of a long response is at its end."""
    if len(text) <= chars:
        return text
    half = chars // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


if __name__ == "__main__":
    sys.exit(main())
