"""The format of prompt data: the paths on the command line, the meaning of columns, validation of rows, their errors.

Paths are `path`, `path@[start:end]`, and several of them with probabilities. No file is opened here, and no tokenizer
is needed. The flag validation and the readers share this module, so that both accept the same paths and rows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimrl.data.images import ImageColumn, check_images, check_pair_images, check_turns
from slimrl.data.preference_pairs import AnswerColumns, PairColumns, number_of, pair_of
from slimrl.data.reward_registry import reward_of

DATA_KINDS = (".jsonl", ".parquet")

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d+)?:(?P<end>-?\d+)?\]", re.DOTALL)
_WEIGHTED = re.compile(r"(?P<path>.+)=(?P<number>[0-9][0-9.eE+-]*|\.[0-9]+)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class DataPath:
    """A data file, or a folder of them, and a Python slice of its rows."""

    path: Path
    rows: slice

    @classmethod
    def parse(cls, text: str) -> DataPath:
        """Parses `file.jsonl` or `file.jsonl@[start:end]`; either bound may be omitted or negative."""
        match = _SLICE.fullmatch(text)
        if match is None:
            if "@[" in text:
                raise ValueError(f"data path {text!r}: a slice is written path@[start:end] with whole numbers")
            return cls(Path(text), slice(None))
        start, end = (int(match[name]) if match[name] else None for name in ("start", "end"))
        return cls(Path(match["path"]), slice(start, end))


@dataclasses.dataclass(frozen=True)
class DataMix:
    """The sets of `--prompt-data`; with `probabilities` None they are concatenated to one set."""

    paths: tuple[str, ...]
    probabilities: tuple[float, ...] | None

    @classmethod
    def parse(cls, words: str | Sequence[str]) -> DataMix:
        """Parses `path`, `path path ...` or `path=probability path=probability ...`.

        A single path is used unchanged, even if it contains "=". Raises ValueError, worded to follow the flag's name,
        if only some paths have a probability, one is not above 0, or they do not sum to 1.
        """
        words = (words,) if isinstance(words, str) else tuple(words)
        if len(words) == 1:
            return cls(words, None)
        matches = [_WEIGHTED.fullmatch(word) for word in words]
        if not any(matches):
            return cls(words, None)
        bare = [word for word, match in zip(words, matches, strict=True) if match is None]
        if bare:
            raise ValueError(
                f"{' '.join(words)} gives some sets a probability but not {', '.join(bare)}: write path=probability for"
                " all sets or for none"
            )
        probabilities = tuple(_probability(match) for match in matches if match is not None)
        if not math.isclose(sum(probabilities), 1.0, abs_tol=1e-6):
            raise ValueError(
                f"{' '.join(words)} has probabilities that sum to {sum(probabilities):g}: make their sum 1"
            )
        return cls(tuple(match["path"] for match in matches if match is not None), probabilities)


def _probability(match: re.Match[str]) -> float:
    try:
        value = float(match["number"])
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise ValueError(f"{match[0]} has the probability {match['number']}: give a number between 0 and 1")
    return value


def files_of(path: Path) -> list[Path]:
    """The data files at `path`: itself, or those directly in the folder, sorted by name.

    Raises FileNotFoundError if it does not exist, ValueError if it is not a data file or has none.
    """
    kinds = " or ".join(DATA_KINDS)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in DATA_KINDS and file.is_file())
        if not files:
            raise ValueError(f"data folder {path} has no {kinds} file: give a folder with such files, or a file")
        return files
    if not path.exists():
        raise FileNotFoundError(f"data file {path} does not exist: give an existing {kinds} file, or a folder of them")
    if path.suffix not in DATA_KINDS:
        raise ValueError(f"data file {path}: unknown file type {path.suffix!r}, use {kinds}")
    return [path]


TOOLS_KEY = "tools"
MESSAGES_KEY = "prompt_messages"
PLACE_KEY = "data_row"  # metadata, until the row is tokenized as a whole: its "<file>:<line>", for errors
_MAX_LISTED = 20


@dataclasses.dataclass(frozen=True)
class InvalidRow:
    """A row that cannot be read; `reason` completes "<file>:<line>: ..."."""

    reason: str


Row = dict[str, Any] | InvalidRow


class InvalidRowsError(ValueError):
    """A dataset has more bad rows than allowed."""


def bad_rows_error(source: str, bad: Sequence[str], allowed: int, fix: str) -> InvalidRowsError:
    """The error for the rows `bad`, each "<file>:<line>: <reason>"; lists the first twenty."""
    more = [f"and {len(bad) - _MAX_LISTED} more"] if len(bad) > _MAX_LISTED else []
    count = "1 bad row" if len(bad) == 1 else f"{len(bad)} bad rows"
    limit = f" ({allowed} allowed)" if allowed else ""
    return InvalidRowsError("\n  ".join([f"{count} in {source}{limit}: {fix}", *bad[:_MAX_LISTED], *more]))


DEFAULT_TEACHER = "default"


@dataclasses.dataclass(frozen=True)
class TeacherChoice:
    """Which teacher of on-policy distillation, by name, a row has; `key` is an entry of its metadata."""

    key: str
    names: tuple[str, ...]
    flag: str  # that has the names

    def of(self, metadata: dict[str, Any], file: str) -> str:
        """The teacher of a row of `file`: that of its metadata, that with the file's name, or the default one.

        Raises ValueError, which completes "<file>:<line>: ...", if none of them exists.
        """
        known = ", ".join(self.names)
        if self.key in metadata:
            name = metadata[self.key]
            if name not in self.names:
                raise ValueError(f"metadata.{self.key} (--opd-teacher-key) is {name!r} and {self.flag} has {known}")
            return str(name)
        for name in (Path(file).stem, DEFAULT_TEACHER):
            if name in self.names:
                return name
        raise ValueError(
            f"no metadata.{self.key} (--opd-teacher-key), and {self.flag} has neither {Path(file).stem!r}, the"
            f" name of the file, nor {DEFAULT_TEACHER!r} but {known}"
        )


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """The meaning of a row's columns, and how its prompt is tokenized."""

    input_key: str
    label_key: str | None
    metadata_key: str
    tool_key: str
    apply_chat_template: bool
    chat_template_kwargs: dict[str, Any]
    max_prompt_len: int | None  # tokens; longer prompts are skipped
    keep_messages: bool  # allow untokenized messages, for custom generate functions
    keep_conversation: bool = False  # store the messages of a rendered prompt in the metadata (`MESSAGES_KEY`)
    refuse_too_long: bool = False  # longer prompts end the run
    pair: PairColumns | AnswerColumns | None = None  # rows are preferences; their answers may contain the prompt
    input_template: str | None = None  # text around the prompt, instead of a chat template; {} stands for the prompt
    truncation: str | None = None  # shorten longer prompts: left, right or middle is cut out
    label_is_score: bool = False  # the label is a reward model's target, a number
    teachers: TeacherChoice | None = None  # with several teachers of on-policy distillation
    reward_rule: str | None = None  # the built-in reward that compares with the label; None: none, or unknown
    images: ImageColumn | None = None  # rows have images
    conversations: bool = False  # rows are whole conversations, whose assistant's turns are trained on

    @property
    def columns(self) -> list[str]:
        """Every column that is read."""
        answers = () if self.pair is None else self.pair.flags
        images = () if self.images is None else self.images.keys.values()
        keys = (self.input_key, self.label_key, self.metadata_key, self.tool_key, *answers, *images)
        return [key for key in keys if key is not None]

    @property
    def required(self) -> dict[str, str]:
        """The columns that every row has, with the flag of each."""
        own = {self.input_key: "--input-key"} if self.pair is None else self.pair.flags
        return own if self.label_key is None else {**own, self.label_key: "--label-key"}

    @property
    def holds_answers(self) -> bool:
        """Whether rows hold the answers, which are tokenized after the prompt."""
        return self.pair is not None or self.conversations


def validate_row(row: Row, form: PromptFormat) -> str | None:
    """Why a row is bad, as far as can be checked without a tokenizer; None if it is valid."""
    if isinstance(row, InvalidRow):
        return row.reason
    try:
        metadata = metadata_of(row, form)
        if form.label_key is not None and form.label_key not in row:
            raise ValueError(f"no column {form.label_key!r} (--label-key); it has {sorted(row)}")
        content = row.get(form.input_key)
        if form.pair is not None:
            pair = pair_of(row, form.input_key, form.pair)
            check_pair_images(row, pair.prompt, [pair.chosen, *pair.rejected], form.images)
            return None
        if form.label_is_score and form.label_key is not None:
            number_of(row, form.label_key, "--label-key")
        if not content:
            state = "an empty" if form.input_key in row else "no"
            raise ValueError(f"{state} column {form.input_key!r} (--input-key); it has {sorted(row)}")
        _check_content(row, content, form)
        if form.label_key is not None and form.reward_rule is not None:
            rule = metadata.get("rm_type") or form.reward_rule
            if (fault := label_fault(str(rule), row[form.label_key])) is not None:
                raise ValueError(fault)
    except ValueError as error:
        return str(error)
    return None


def _check_content(row: dict[str, Any], content: Any, form: PromptFormat) -> None:
    """Raises ValueError for an input column of the wrong form, or whose images are bad."""
    if form.conversations and isinstance(content, str):
        raise ValueError(f"{form.input_key!r} (--input-key) is text and must be a list of messages")
    if form.apply_chat_template:
        if not isinstance(content, str) and not _are_messages(content):
            raise ValueError(f'{form.input_key!r} must be text or a list of {{"role", "content"}} messages')
        check_images(row, messages_of(content), form.images)
    elif not isinstance(content, str) and form.input_template is not None:
        raise ValueError(f"{form.input_key!r} holds {type(content).__name__}: --input-template takes text")
    elif not isinstance(content, str) and not form.keep_messages:
        raise ValueError(f"{form.input_key!r} holds {type(content).__name__}: messages need --apply-chat-template")
    elif _are_messages(content):
        if form.conversations:
            _check_turns_to_train(content, scored=form.label_is_score)
        if form.images is not None:
            check_images(row, content, form.images)
            check_turns(content)


def _check_turns_to_train(conversation: list[dict[str, Any]], *, scored: bool) -> None:
    """Raises ValueError for an empty turn of the assistant, a score of another's turn, and if no turn is trained on."""
    for number, message in enumerate(conversation):
        if message["role"] != "assistant" or message.get("step_loss_mask") == 0:
            continue
        content = message.get("content")
        said = content.strip() if isinstance(content, str) else content
        if not (said or message.get("tool_calls") or message.get("reasoning_content")):
            raise ValueError(
                f"message {number} is the assistant's and is empty, so that its end alone would be trained on: remove"
                ' the row, or give the message "step_loss_mask": 0'
            )
    if scored and conversation[-1]["role"] != "assistant":
        raise ValueError("the conversation does not end with a message of the assistant, which the score is of")
    if not any(one["role"] == "assistant" and one.get("step_loss_mask") != 0 for one in conversation):
        raise ValueError(
            'no message of the assistant is trained on: remove the row, or leave out one "step_loss_mask": 0'
        )


def needs_label(rule: str) -> bool:
    """Whether the built-in reward `rule` (also with the prefix boxed_) compares with the label."""
    row = reward_of(rule)
    return row is not None and row.label.compared


def label_fault(rule: str, label: Any) -> str | None:
    """Why the built-in reward `rule` cannot compare with `label`; None if it can, or does not use labels."""
    row = reward_of(rule)
    return None if row is None else row.label.fault(label)


def messages_of(content: Any) -> list[dict[str, Any]]:
    """The messages of a row's input column; text becomes one user message."""
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


def in_template(template: str, text: str) -> str:
    """The template with `text` for its {}; other braces, and those of the text, are unchanged."""
    return text.join(template.split("{}", 1))


def truncated(token_ids: Sequence[int], limit: int, cut: str) -> list[int]:
    """The `limit` token ids that remain of more; `cut` is what is cut out: "left", "right" or "middle".

    "middle" keeps one token more of the end than of the beginning if the limit is odd.
    """
    head = {"left": 0, "right": limit, "middle": limit // 2}[cut]
    return [*token_ids[:head], *token_ids[len(token_ids) - (limit - head) :]]


def _are_messages(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(message, dict) and "role" in message for message in content)


def tools_of(row: dict[str, Any], form: PromptFormat) -> list[Any] | None:
    """The row's tool schemas. Raises ValueError if the column is not a list."""
    tools = _decoded(row.get(form.tool_key), form.tool_key)
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{form.tool_key!r} (--tool-key) must be a list of tool schemas, not {type(tools).__name__}")
    return tools or None


def _decoded(value: Any, key: str) -> Any:
    """The value, decoded if it is JSON text: Parquet files often store nested data so."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{key!r} is text that is not JSON: {error}") from error


def metadata_of(row: dict[str, Any], form: PromptFormat) -> dict[str, Any]:
    """The row's metadata, plus its tool schemas under "tools" and, with `keep_conversation`, its messages."""
    metadata = _decoded(row.get(form.metadata_key), form.metadata_key)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{form.metadata_key!r} (--metadata-key) must be an object, not {type(metadata).__name__}")
    tools = tools_of(row, form)
    if form.keep_conversation and (form.apply_chat_template or form.input_template is not None):
        metadata = {MESSAGES_KEY: messages_of(row.get(form.input_key)), **metadata}
    return metadata if tools is None else {**metadata, TOOLS_KEY: tools}
