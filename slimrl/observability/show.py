"""Rollout dumps in readable form: `python -m slimrl.observability.show dump.jsonl` on a terminal, `page` for a browser.

The page is self-contained: a table to search and sort, every sample in full, tokens one by one; tools/show_rollouts.py
writes it. The table is DataTables, brought by itables. Text of models is shown as text, never as markup. `token_pieces`
splits a response into the shortest runs of tokens that end where a character ends.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any, Protocol

from slimrl.data.images import DATA_URI, IMAGES, VIDEOS
from slimrl.data.sample import Sample, SampleStatus, format_spans
from slimrl.observability.rollout_dump import RolloutDump, read_dump

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4  # tokens: UTF-8 has at most 4 bytes for a character, and no token has less than one


class Decoder(Protocol):
    """The part of a tokenizer's interface that the viewer needs."""

    def decode(self, token_ids: list[int]) -> str: ...


class RememberingDecoder:
    """A tokenizer that decodes each token by itself once only: the same ones come again and again."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def decode(self, token_ids: list[int]) -> str:
        """As the tokenizer."""
        if len(token_ids) != 1:
            return self._tokenizer.decode(token_ids)
        (token,) = token_ids
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode(token_ids)
        return self._texts[token]


def token_pieces(tokenizer: Decoder, tokens: Sequence[int]) -> Iterator[tuple[str, int]]:
    """(text, number of tokens) of the shortest runs of `tokens` that end where a character ends, in order.

    Byte-level tokenizers cut characters apart; a run of more than four tokens that still is none stays as it is.
    """
    start = 0
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(list(tokens[start:end]))
        if text.endswith(_INCOMPLETE) and end < len(tokens) and end - start < _LONGEST_CHARACTER:
            continue
        yield text, end - start
        start = end


_PREVIEW = 160  # characters of prompt and response in the table


def page(dumps: Sequence[RolloutDump], tokenizer: Decoder | None, *, reward_key: str | None = None) -> str:
    """HTML of all samples in `dumps`. Without `tokenizer` a response is one piece of text without colours.

    `reward_key` names the entry to sort by where rewards are dicts, instead of the one that a dump names. Raises
    ValueError where it is missing in one.
    """
    import jinja2

    tokenizer = None if tokenizer is None else RememberingDecoder(tokenizer)
    samples = [
        (f"{_rollout_name(dump)}/{sample.index}", sample, reward_key or key)
        for dump in dumps
        for sample, key in zip(dump.samples, dump.reward_keys(), strict=True)
    ]
    data = [_details(name, sample, tokenizer) for name, sample, _ in samples]
    pictures = {uri: number for number, uri in enumerate({uri: None for row in data for _, uri in row["pictures"]})}
    for row in data:  # the samples of a prompt share its pictures
        row["pictures"] = [(caption, pictures[uri]) for caption, uri in row["pictures"]]
    rows = [_page_row(name, sample, key) for name, sample, key in samples]
    files = resources.files("slimrl.observability") / "viewer_page"
    text = {name: (files / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")}
    titles = ", ".join(_rollout_name(dump) for dump in dumps)
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(text["page.html"])
    return template.render(
        title=f"Rollout {titles}",
        count=f"{_number(len(samples), 'sample')} in {_number(len(dumps), 'rollout')}",
        metrics=_mean_metrics(dumps),
        table=_table(rows),
        data=json.dumps(data).replace("<", "\\u003c"),  # no text can end the script element
        pictures=json.dumps(list(pictures)).replace("<", "\\u003c"),
        style=text["page.css"],
        script=text["page.js"],
    )


def _rollout_name(dump: RolloutDump) -> str:
    return f"eval {dump.header['rollout_id']}" if dump.header["evaluation"] else str(dump.header["rollout_id"])


def _mean_metrics(dumps: Sequence[RolloutDump]) -> dict[str, str]:
    """The metrics in the dumps' headers, where several hold one their mean."""
    values: dict[str, list[float]] = {}
    for dump in dumps:
        for name, value in dump.header["metrics"].items():
            values.setdefault(name, []).append(value)
    return {name: f"{statistics.fmean(found):.4g}" for name, found in values.items()}


def _page_row(name: str, sample: Sample, reward_key: str | None) -> dict[str, Any]:
    return {
        "sample": name,
        "group": sample.group_index,
        "reward": None if sample.reward is None else sample.reward_value(reward_key),
        "status": sample.status.value + (" (removed)" if sample.remove_sample else ""),
        "prompt tokens": sample.prompt_length,
        "response tokens": sample.response_length,
        "mean logprob": round(statistics.fmean(sample.rollout_log_probs), 3) if sample.rollout_log_probs else None,
        "weights": ", ".join(dict.fromkeys(sample.weight_versions)),
        "prompt": _preview(prompt_text(sample)),
        "response": _preview(sample.response),
    }


def _preview(text: str) -> str:
    """The end of a text, which has the question or the answer."""
    line = " ".join(text.split())
    return line if len(line) <= _PREVIEW else f"…{line[-_PREVIEW:]}"


def prompt_text(sample: Sample) -> str:
    """The prompt, a conversation as one paragraph per message."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    return "\n".join(f"[{message.get('role')}] {message.get('content')}" for message in sample.prompt)


def reward_text(sample: Sample) -> str:
    """The whole reward on one line."""
    return json.dumps(sample.reward, ensure_ascii=False) if isinstance(sample.reward, dict) else str(sample.reward)


def _details(name: str, sample: Sample, tokenizer: Decoder | None) -> dict[str, Any]:
    facts = {
        "group": sample.group_index,
        "status": sample.status.value,
        "reward": None if sample.reward is None else reward_text(sample),
        "label": sample.label,
        "tokens": f"{sample.prompt_length} + {sample.response_length}",
        "weight versions": format_spans(sample.version_spans) or ", ".join(dict.fromkeys(sample.weight_versions)),
        "session": sample.session_id,
        "metadata": json.dumps(sample.metadata, ensure_ascii=False) if sample.metadata else None,
    }
    return {
        "name": name,
        "facts": {key: str(value) for key, value in facts.items() if value not in (None, "")},
        "prompt": prompt_text(sample),
        "pictures": pictures_of(sample),
        "response": _pieces(sample, tokenizer),
        "truncated": sample.status is SampleStatus.TRUNCATED,
    }


def pictures_of(sample: Sample) -> list[tuple[str, str]]:
    """(caption, data URI) of each image of a sample, and of the first frame of each of its videos."""
    seen = sample.multimodal_inputs or {}
    found = [(f"image {number}", uri) for number, uri in enumerate(seen.get(IMAGES) or (), start=1)]
    for number, video in enumerate(seen.get(VIDEOS) or (), start=1):
        found.append((f"video {number}: {_number(len(video['frames']), 'frame')}", video["frames"][0]))
    return [(caption, uri) for caption, uri in found if isinstance(uri, str) and DATA_URI.match(uri)]


def _pieces(sample: Sample, tokenizer: Decoder | None) -> list[tuple[Any, ...]]:
    """(text, log-probabilities, whether it is trained on) of the response's pieces.

    Where several weights drew a response, the first piece of each has their version as a fourth entry.
    """
    tokens = sample.tokens[sample.prompt_length :]
    if tokenizer is None or not tokens:
        return [(sample.response, [], True)]
    log_probs = sample.rollout_log_probs or []
    mask = sample.loss_mask or [1] * len(tokens)
    begins = _version_begins(sample)
    pieces, start = [], 0
    for text, count in token_pieces(tokenizer, tokens):
        end = start + count
        piece: tuple[Any, ...] = (text, [round(value, 4) for value in log_probs[start:end]], any(mask[start:end]))
        versions = [begins[place] for place in range(start, end) if place in begins]
        pieces.append((*piece, versions[-1]) if versions else piece)
        start = end
    return pieces


def _version_begins(sample: Sample) -> dict[int, str]:
    """By the place in the response the version that draws from there on; nothing where all is of one."""
    if len(sample.version_spans) < 2:
        return {}
    counts = [int(count) for _, count in sample.version_spans]
    starts = itertools.accumulate(counts, initial=0)
    return {start: str(version) for start, (version, _) in zip(starts, sample.version_spans, strict=False)}


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _table(rows: list[dict[str, Any]]) -> str:
    import itables
    import itables.options
    import pandas
    from itables.javascript import generate_init_offline_itables_html

    table = itables.to_html_datatable(
        pandas.DataFrame(rows),
        connected=False,
        table_id="rollouts",
        showIndex=False,
        maxBytes=0,  # every sample, however many
        classes="display compact",
        layout={"topStart": None, "topEnd": "pageLength", "bottomStart": "info", "bottomEnd": "paging"},
        lengthMenu=[25, 100, 1000],
        style="width:100%",
    )
    return generate_init_offline_itables_html(itables.options.dt_bundle) + table


_REWARD_WIDTH = 32  # characters


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table of all samples, then the chosen ones in full; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m slimrl.observability.show",
        description="Prints a rollout dump in readable form.",
        allow_abbrev=False,
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
