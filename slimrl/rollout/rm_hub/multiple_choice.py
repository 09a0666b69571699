"""Multiple choice in the manner of GPQA: which letter a response settles on, or which choice it spells out."""

from __future__ import annotations

import re
from typing import Any

from slimrl.rollout.rm_hub.boxed import last_boxed, without_special_tokens
from slimrl.rollout.rm_hub.choice_letters import Statement, statements

LETTERS = "ABCDEFGHIJ"
_ALONE = re.compile(r"[\s*_`$(\[{]*(?:\\text\{)?\(?([A-Za-z])[)\]}.:*_`$\s]*")
_LEADING = re.compile(r"\s{0,9}\(?([A-Z])[).:]\s+\S")
_PARENTHESISED = re.compile(r"\(([A-Z])\)")
_POINTED_AT = re.compile(r"(?:^|[:=→;,—–-])[\s*(]*([B-HJ])[)*]*[.!]?\s*$")


def question(label: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """What judging needs of a sample: `letters` in use, the right `letter`, and the `choices` by letter.

    The right answer is `metadata.correct_letter`, or the label: a letter, the number of a choice from 0, or a choice's
    text. Choices are `metadata.choices`, a list or a dict by letter. Raises ValueError where they do not fit.
    """
    choices = metadata.get("choices") or []
    if not isinstance(choices, dict):
        choices = dict(zip(LETTERS, map(str, choices), strict=False))
    letters = metadata.get("valid_letters") or list(choices) or list(LETTERS[:8])
    letters = [str(letter).upper() for letter in letters]
    letter = _right_letter(metadata.get("correct_letter", label), letters, choices)
    if letter is None:
        raise ValueError(
            f"the label is {label!r}, and gpqa rewards need one of the letters {', '.join(letters)}, the number of a"
            " choice or its text (metadata.choices): check --label-key and --metadata-key"
        )
    return {"letters": letters, "letter": letter, "choices": choices}


def is_right(response: str, question: dict[str, Any]) -> bool:
    """Whether the response settles on the right letter, or, naming none, spells out the right choice and no other."""
    letter = chosen_letter(response, question["letters"])
    if letter is not None:
        return letter == question["letter"]
    choices = {name: _words(text) for name, text in question["choices"].items()}
    if question["letter"] not in choices:
        return False
    tail = _words(last_boxed(response) or response[-2000:])
    spelled = [
        name
        for name, text in choices.items()
        if text and re.search(rf"(?<!\bnot)(?<!\bnot the)(?<!\bnot a) {re.escape(text)} ", f" {tail} ")
    ]
    longest = max(spelled, key=lambda name: len(choices[name]), default=None)
    return longest == question["letter"]


def chosen_letter(response: str, letters: list[str]) -> str | None:
    """The letter of the last box, else of the last line that is one, else the one that the text last calls the answer
    without taking it back, else the last one in parentheses or at the end of the last line that it does not deny."""
    boxed = last_boxed(response)
    for pattern, text in (
        (_ALONE, boxed or ""),
        (_LEADING, boxed or ""),
    ):
        match = pattern.match(text)
        if match is not None and match[1].upper() in letters and (pattern is _LEADING or match.end() == len(text)):
            return match[1].upper()
    response = without_special_tokens(response)
    lines = [line for line in response.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if (match := _ALONE.fullmatch(last)) and match[1].upper() in letters:
        return match[1].upper()
    said = statements(response, letters)
    settled, denied = _settled(said)
    if settled is not None:
        return settled
    if any(statement.says == "open" for statement in said[-1:]):
        return None
    for pattern, text in ((_PARENTHESISED, response), (_LEADING, last), (_POINTED_AT, last)):
        found = [letter for letter in pattern.findall(text) if letter in letters]
        if found:
            return found[-1] if found[-1] not in denied else None
    return None


def _settled(said: list[Statement]) -> tuple[str | None, set[str]]:
    """The letter that was last called the answer and not taken back, and those that were last said not to be it.

    What is only said to be true or false does not replace what was called the answer, unless that was taken back.
    """
    settled, weight, denied = None, 0, set()
    for statement in said:
        weight = min(weight, 1) if statement.rethought else weight
        if statement.says == "is" and statement.weight >= weight:
            (settled,), weight = set(statement.letters), statement.weight
            denied.discard(settled)
        elif statement.says == "is not":
            denied |= set(statement.letters)
            if settled in denied and statement.weight >= weight:
                settled, weight = None, 0
        elif statement.says == "open":
            settled, weight = None, 0
    return settled, denied


def _right_letter(label: Any, letters: list[str], choices: dict[str, str]) -> str | None:
    if isinstance(label, int) and not isinstance(label, bool):
        return letters[label] if 0 <= label < len(letters) else None
    if not isinstance(label, str) or not label.strip():
        return None
    boxed = last_boxed(label)
    text = (label if boxed is None else boxed).strip()
    match = _ALONE.fullmatch(text)
    if match is not None and match[1].upper() in letters:
        return match[1].upper()
    if text.isdecimal() and int(text) < len(letters) and text not in choices.values():
        return letters[int(text)]
    return next((name.upper() for name, choice in choices.items() if _words(choice) == _words(text)), None)


def _words(text: str) -> str:
    return " ".join(re.findall(r"[+-]?\w+(?:[.+-]\w+)*", text.casefold()))
