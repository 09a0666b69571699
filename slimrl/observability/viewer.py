"""Rollout dumps as one self-contained web page: a table to search and sort, every sample in full, tokens one by one.

The table is DataTables, brought by itables. Text of models is shown as text, never as markup. `token_pieces` splits a
response into the shortest runs of tokens that end where a character ends. tools/show_rollouts.py calls `page`.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any, Protocol

from slimrl.data.sample import Sample, SampleStatus, format_spans
from slimrl.observability.rollout_dump import RolloutDump

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
    rows = [_row(name, sample, key) for name, sample, key in samples]
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


def _row(name: str, sample: Sample, reward_key: str | None) -> dict[str, Any]:
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
        "response": _pieces(sample, tokenizer),
        "truncated": sample.status is SampleStatus.TRUNCATED,
    }


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
