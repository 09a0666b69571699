"""Which tokens of a rendered conversation are the assistant's: one row for each shape of chat template.

A conversation is rendered and tokenized once as a whole, so that its tokens are those of generation. The assistant's
turns are found by the markers of the template (`TURN_MARKS`), or are the template's own `{% generation %}` blocks
(`CHAT_TEMPLATE`). A marker that is a part of a message's text is no marker: turns are found in a second rendering,
with other characters in its place. Imports nothing heavy at the top: the flags are checked with this table.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class TurnMarks:
    """A template's markers before an assistant's turn, and after it; those after are trained on.

    `stops` are markers of other turns, which end a turn and are not trained on. `final` is the end marker of the last
    turn in a template that leaves it to the model. `required` tells a template from others with the same markers.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    stops: tuple[str, ...] = ()
    final: str = ""
    required: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """What makes a text a marker: its leading special token, or all of it; the longest first."""
        found = {_leading_token(mark) for mark in (*self.before, *self.after, *self.stops)}
        return tuple(sorted(found, key=lambda token: (-len(token), token)))


_CHATML = TurnMarks(("<|im_start|>assistant\n",), ("<|im_end|>",))
# the answer to tool outputs follows them without the assistant's marker
_DEEPSEEK = TurnMarks(("<｜Assistant｜>", "<｜tool▁outputs▁end｜>"), ("<｜end▁of▁sentence｜>",))
# --loss-mask-type -> the markers of that family's chat template
TURN_MARKS: dict[str, TurnMarks] = {
    "qwen": _CHATML,
    "qwen3": _CHATML,
    "qwen3_5": _CHATML,
    "distill_qwen": _DEEPSEEK,
    "deepseek": _DEEPSEEK,
    "deepseek_v2": TurnMarks(("Assistant:",), ("<｜end▁of▁sentence｜>",)),
    "llama2": TurnMarks(("[/INST]",), ("</s>",)),
    "llama3": TurnMarks(("<|start_header_id|>assistant<|end_header_id|>\n\n",), ("<|eot_id|>", "<|eom_id|>")),
    "glm4": TurnMarks(
        ("<|assistant|>",),
        ("<|user|>", "<|observation|>"),  # generation stops at these: the next turn's marker is the end marker
        stops=("<|assistant|>", "<|system|>"),
        final="<|user|>",
        required=("[gMASK]",),
    ),
    "kimi": TurnMarks(("<|im_assistant|>assistant<|im_middle|>",), ("<|im_end|>",)),
}
CHAT_TEMPLATE = "chat_template"  # the spans are the template's {% generation %} blocks
LOSS_MASK_TYPES = (*TURN_MARKS, CHAT_TEMPLATE)
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclasses.dataclass(frozen=True)
class MaskedConversation:
    """A conversation's text and token ids, with 1 for each trained token.

    `offsets` are the tokens' character ranges, None from a tokenizer without them.
    """

    text: str
    ids: list[int]
    mask: list[int]
    offsets: Sequence[tuple[int, int]] | None


def fitting_types(template: str) -> list[str]:
    """The --loss-mask-type values whose markers the source of a chat template has."""
    found = [CHAT_TEMPLATE] if _GENERATION_BLOCK.search(template) else []
    for name, marks in TURN_MARKS.items():
        ends = any(_leading_token(mark) in template for mark in marks.after) or "eos_token" in template
        begins = any(_leading_token(mark) in template for mark in marks.before)
        if begins and ends and all(text in template for text in marks.required):
            found.append(name)
    return found


def masked_conversation(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    mask_type: str,
    *,
    tools: Any = None,
    template_options: Mapping[str, Any] | None = None,
) -> MaskedConversation:
    """The tokens of a conversation with their loss mask; `template_options` are arguments of the chat template.

    Raises ValueError if the template rejects the conversation, if it renders another number of assistant turns, or if
    its rendering depends on a marker in a message's text.
    """
    options = dict(template_options or {})
    text = _rendered(tokenizer, messages, tools, options)
    if mask_type == CHAT_TEMPLATE:
        spans = _generation_spans(tokenizer, messages, tools, options, text)
    else:
        marks = TURN_MARKS[mask_type]
        plain = _without_literal_marks(tokenizer, messages, tools, options, text, marks)
        if marks.final and any(end == len(plain) for _, end in assistant_spans(plain, marks)):
            text, plain = text + marks.final, plain + marks.final
        spans = assistant_spans(plain, marks)
    trained = trained_turns(messages)
    _check_turns(spans, trained)
    if not getattr(tokenizer, "is_fast", True):
        return _masked_by_parts(tokenizer, text, spans, trained)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    return MaskedConversation(text, list(encoded["input_ids"]), conversation_mask(offsets, spans, trained), offsets)


def assistant_spans(text: str, marks: TurnMarks) -> list[tuple[int, int]]:
    """Character ranges of the assistant turns in a rendered conversation; the last turn may lack its end marker."""
    begins, ends = _any_of(marks.before), _any_of((*marks.after, *marks.stops))
    spans = []
    begin = begins.search(text)
    while begin is not None:
        end = ends.search(text, begin.end())
        position = len(text)
        if end is not None:
            position = end.start() if end.group() in marks.stops else end.end()
        spans.append((begin.end(), position))
        begin = begins.search(text, position)
    return spans


def trained_turns(messages: Sequence[dict[str, Any]]) -> list[bool]:
    """For each assistant message, whether it is trained on: `step_loss_mask` 0 excludes it."""
    return [bool(message.get("step_loss_mask", 1)) for message in messages if message.get("role") == "assistant"]


def conversation_mask(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], trained: Sequence[bool]
) -> list[int]:
    """1 for each token that begins within a trained span; `offsets` are the tokens' character ranges.

    Raises ValueError if the template rendered a different number of assistant turns.
    """
    _check_turns(spans, trained)
    chosen = [span for span, is_trained in zip(spans, trained, strict=True) if is_trained]
    return [int(any(start <= begin < end for start, end in chosen)) for begin, _ in offsets]


def _check_turns(spans: Sequence[tuple[int, int]], trained: Sequence[bool]) -> None:
    if len(spans) != len(trained):
        raise ValueError(
            f"the chat template rendered {len(spans)} assistant turns but the conversation has {len(trained)}:"
            " choose the --loss-mask-type of the model's family"
        )


def _rendered(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any, options: Mapping[str, Any]) -> str:
    try:
        text: str = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    except Exception as error:  # the template is the model's code: it may raise anything
        raise ValueError(f"the chat template rejects it: {type(error).__name__}: {error}") from error
    return text


def _without_literal_marks(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: Any,
    options: Mapping[str, Any],
    text: str,
    marks: TurnMarks,
) -> str:
    """The rendered `text`, character for character, with other characters for markers in the messages' texts."""
    unused = (chr(code) for code in itertools.count(0xE000) if chr(code) not in text)  # of the private-use area
    fillers = {token: next(unused) * len(token) for token in marks.tokens}
    given = (list(messages), tools, dict(options))
    shielded = _replaced(given, fillers)
    if shielded == given:
        return text
    plain = _rendered(tokenizer, *shielded)
    if _replaced(plain, {filler: token for token, filler in fillers.items()}) != text:
        raise ValueError(
            f"its texts contain a marker of the chat template ({' or '.join(marks.tokens)}), and the template renders"
            " them differently without it: take it out of the row"
        )
    return plain


def _replaced(value: Any, replacements: Mapping[str, str]) -> Any:
    """The value with replacements in every text within lists and objects; a template given as an option stays."""
    if isinstance(value, str):
        for old, new in replacements.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, dict):
        return {
            _replaced(key, replacements): item if key == "chat_template" else _replaced(item, replacements)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, replacements) for item in value)
    return value


def _generation_spans(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any, options: Mapping[str, Any], text: str
) -> list[tuple[int, int]]:
    """Character ranges of the template's {% generation %} blocks; blocks without text between them are one.

    By characters, since transformers' mask of tokens extends to the end of the text if a block ends with a space that
    no token covers.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {**tokenizer.special_tokens_map, **options}
    template = tokenizer.get_chat_template(variables.pop("chat_template", None), tools)
    texts, blocks = render_jinja_template(
        conversations=[list(messages)],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **variables,
    )
    if texts[0] != text:
        raise ValueError("the chat template renders it differently each time, so that its turns cannot be located")
    spans: list[tuple[int, int]] = []
    for start, end in blocks[0]:
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
    return spans


def _masked_by_parts(
    tokenizer: Any, text: str, spans: Sequence[tuple[int, int]], trained: Sequence[bool]
) -> MaskedConversation:
    """The mask with a tokenizer in Python, which has no offsets: turns and the texts between are tokenized apart."""
    ids: list[int] = []
    mask: list[int] = []
    position = 0
    for (start, end), is_trained in zip([*spans, (len(text), len(text))], [*trained, False], strict=True):
        for part, value in ((text[position:start], 0), (text[start:end], int(is_trained))):
            tokens = tokenizer(part, add_special_tokens=False)["input_ids"] if part else []
            ids += tokens
            mask += [value] * len(tokens)
        position = end
    if ids != list(tokenizer(text, add_special_tokens=False)["input_ids"]):
        raise ValueError(
            "its turns have other tokens apart than in the conversation, and the tokenizer, which is Python code, does"
            " not tell where tokens begin: use a fast tokenizer (tokenizer.json)"
        )
    return MaskedConversation(text, ids, mask, None)


def _any_of(marks: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


def _leading_token(mark: str) -> str:
    token = re.match(r"<[^<>]+>", mark)
    return mark if token is None else token.group()
