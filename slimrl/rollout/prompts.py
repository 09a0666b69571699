"""Turns data rows into prompts: text or chat messages to token ids, once, with label and metadata beside them.

Every row becomes exactly one prompt or is counted as too long; bad rows are all named in one error.
Called by the training data source and by evaluation, so that both see a row the same way.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import logging
from array import array
from typing import Any

from slimrl.data.readers import raise_for_bad_rows, read_rows
from slimrl.data.sample import Sample

logger = logging.getLogger(__name__)

TOOLS_KEY = "tools"
_TOKENIZER_BATCH = 1024


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """Which columns of a row mean what, and how its prompt becomes tokens."""

    input_key: str
    label_key: str | None
    metadata_key: str
    tool_key: str
    apply_chat_template: bool
    chat_template_kwargs: dict[str, Any]
    max_prompt_len: int | None  # tokens; longer prompts are left out
    keep_messages: bool  # a custom generate function may take messages as they are, without tokens


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One row of a data set, ready to be sampled from.

    `content` is what the model is asked: the rendered chat template, or the input column as it stands.
    """

    content: str | list[dict[str, Any]]
    token_ids: array[int]
    label: Any
    metadata: dict[str, Any]

    def sample(self, *, group_index: int, index: int) -> Sample:
        """A new sample of this prompt that shares nothing changeable with any other."""
        return Sample(
            prompt=_independent(self.content),
            group_index=group_index,
            index=index,
            label=_independent(self.label),
            tokens=self.token_ids.tolist(),
            metadata=_independent(self.metadata),
        )


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """The prompts of one data set in file order, those above the length limit left out and counted."""

    source: str
    prompts: list[Prompt]
    too_long: int
    fingerprint: str  # of every prompt's tokens and label, in order

    def __len__(self) -> int:
        return len(self.prompts)


def load_prompts(data_path: str, prompt_format: PromptFormat, tokenizer: Any) -> PromptSet:
    """Reads, checks, renders and tokenises a data set; `tokenizer` is a transformers tokenizer.

    Token ids equal `tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)`, or
    `tokenizer(text, add_special_tokens=False)` without a chat template. Raises ValueError naming every bad
    row, and where the length limit leaves no prompt.
    """
    rows = read_rows(data_path)
    contents = _render_rows(data_path, rows, prompt_format, tokenizer)
    limit = prompt_format.max_prompt_len
    prompts: list[Prompt] = []
    for row, content, token_ids in zip(rows, contents, _tokenize(contents, tokenizer), strict=True):
        if limit is None or len(token_ids) <= limit:
            label = row[prompt_format.label_key] if prompt_format.label_key is not None else None
            prompts.append(Prompt(content, token_ids, label, _metadata(row, prompt_format)))
    too_long = len(rows) - len(prompts)
    if not prompts:
        raise ValueError(
            f"data set {data_path}: all {len(rows)} prompts are longer than the limit of {limit} tokens"
            " (--rollout-max-prompt-len, --eval-max-prompt-len): raise the limit or give shorter prompts"
        )
    if too_long:
        logger.warning("%s: left out %d of %d prompts, longer than %d tokens", data_path, too_long, len(rows), limit)
    return PromptSet(data_path, prompts, too_long, _fingerprint(prompts))


def _render_rows(
    source: str, rows: list[dict[str, Any]], form: PromptFormat, tokenizer: Any
) -> list[str | list[dict[str, Any]]]:
    contents: list[str | list[dict[str, Any]]] = []
    bad: list[str] = []
    for number, row in enumerate(rows):
        try:
            _metadata(row, form)
            if form.label_key is not None and form.label_key not in row:
                raise ValueError(f"no column {form.label_key!r} (--label-key); it has {sorted(row)}")
            contents.append(_render(row, form, tokenizer))
        except ValueError as error:
            bad.append(f"row {number} (the first is 0): {error}")
    raise_for_bad_rows(source, bad)
    return contents


def _render(row: dict[str, Any], form: PromptFormat, tokenizer: Any) -> str | list[dict[str, Any]]:
    """What the model is asked. Raises ValueError saying what is wrong with the row."""
    content = row.get(form.input_key)
    if not content:
        state = "an empty" if form.input_key in row else "no"
        raise ValueError(f"{state} column {form.input_key!r} (--input-key); it has {sorted(row)}")
    if form.apply_chat_template:
        return _apply_chat_template(_messages(content, form), row, form, tokenizer)
    if isinstance(content, str) or form.keep_messages:
        return content
    raise ValueError(f"{form.input_key!r} holds {type(content).__name__}: messages need --apply-chat-template")


def _messages(content: Any, form: PromptFormat) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if not isinstance(content, list) or not all(isinstance(m, dict) and "role" in m for m in content):
        raise ValueError(f'{form.input_key!r} must be text or a list of {{"role", "content"}} messages')
    return content


def _apply_chat_template(
    messages: list[dict[str, Any]], row: dict[str, Any], form: PromptFormat, tokenizer: Any
) -> str:
    tools = _tools(row, form)
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **form.chat_template_kwargs
        )
    except Exception as error:  # the template is the model's own program: it may raise anything
        raise ValueError(f"the chat template refuses it: {type(error).__name__}: {error}") from error


def _tools(row: dict[str, Any], form: PromptFormat) -> list[Any] | None:
    tools = _decoded(row.get(form.tool_key), form.tool_key)
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{form.tool_key!r} (--tool-key) must be a list of tool schemas, not {type(tools).__name__}")
    return tools or None


def _decoded(value: Any, key: str) -> Any:
    """Parquet files often hold nested data as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{key!r} is text that is not JSON: {error}") from error


def _metadata(row: dict[str, Any], form: PromptFormat) -> dict[str, Any]:
    """The row's metadata, and its tool schemas under "tools", where user code looks for them."""
    metadata = _decoded(row.get(form.metadata_key), form.metadata_key)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{form.metadata_key!r} (--metadata-key) must be an object, not {type(metadata).__name__}")
    tools = _tools(row, form)
    return metadata if tools is None else {**metadata, TOOLS_KEY: tools}


def _tokenize(contents: list[str | list[dict[str, Any]]], tokenizer: Any) -> list[array[int]]:
    """Token ids as unsigned 32-bit arrays: a list of Python integers would take nine times the memory."""
    token_ids = [array("I") for _ in contents]
    texts = [row for row, content in enumerate(contents) if isinstance(content, str)]
    for start in range(0, len(texts), _TOKENIZER_BATCH):
        rows = texts[start : start + _TOKENIZER_BATCH]
        encoded = tokenizer([contents[row] for row in rows], add_special_tokens=False)
        for row, ids in zip(rows, encoded["input_ids"], strict=True):
            token_ids[row].extend(ids)
    return token_ids


def _fingerprint(prompts: list[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        label = json.dumps(prompt.label, sort_keys=True, default=str).encode()
        digest.update(len(prompt.token_ids).to_bytes(8, "little") + prompt.token_ids.tobytes())
        digest.update(len(label).to_bytes(8, "little") + label)
    return digest.hexdigest()


def _independent(value: Any) -> Any:
    """A deep copy; texts and numbers, which cannot change, as they are (a deep copy costs microseconds)."""
    if value is None or isinstance(value, str | int | float):
        return value
    return copy.deepcopy(value)
