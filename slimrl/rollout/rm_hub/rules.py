"""The rules that judge a response in a grader's process, by name; pure functions of text.

Called by `grader_worker` with what `builtin` packed on the other side of the pipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from slimrl.rollout.rm_hub import instructions, multiple_choice, overlap
from slimrl.rollout.rm_hub.boxed import last_boxed, without_special_tokens
from slimrl.rollout.rm_hub.equality import answers_equal

Algebra = Callable[[str, str], bool]

DAPO_TAIL_CHARS = 300
NO_ANSWER = "[INVALID]"
THINKING_ENDS = ("</think>", "###Response")
_ANSWER_LINE = re.compile(r"(?i)answer[\s*_]*[:：][\s*_`]*([^\n]+)")
# emphasis is not part of an answer; between two values `**` is a power
_EMPHASIS = re.compile(r"(?<![\w)}])\*\*|\*\*(?![\w({\\])|^[*_`\s]+|[*_`\s]+$")
_TEXT_COMMAND = re.compile(r"\\text[a-z]*\s*\{([^{}]*)\}")


def judge(request: dict[str, Any], algebra: Algebra) -> float | dict[str, Any]:
    """The reward of `request["response"]` by `request["rule"]`.

    With `boxed` only the content of its last box is judged, and a response without one is wrong.
    """
    response = request["response"]
    if request["boxed"]:
        response = last_boxed(response)
        if response is None:
            return wrong(request["rule"])
    return _RULES[request["rule"]](response, request, algebra)


def wrong(rule: str) -> float | dict[str, Any]:
    """The reward of an answer that is wrong, missing, or without a verdict."""
    return {"score": -1.0, "acc": False, "pred": NO_ANSWER} if rule == "dapo" else 0.0


def after_thinking(response: str) -> str | None:
    """What follows the last end-of-thinking marker; None where the response never ends its thinking."""
    for marker in THINKING_ENDS:
        _, found, rest = response.rpartition(marker)
        if found:
            return rest
    return None


def _math(response: str, request: dict[str, Any], algebra: Algebra) -> float:
    answer = response if request["boxed"] else last_boxed(response)
    return float(answer is not None and answers_equal(answer, request["label"], algebra))


def _deepscaler(response: str, request: dict[str, Any], algebra: Algebra) -> float:
    if not request["boxed"]:
        response = after_thinking(response) or ""
    return _math(response, request, algebra)


def _dapo(response: str, request: dict[str, Any], algebra: Algebra) -> dict[str, Any]:
    if request["boxed"]:
        pred = response.strip()
    else:
        found = _ANSWER_LINE.findall(without_special_tokens(response[-DAPO_TAIL_CHARS:]))
        if not found:
            return wrong("dapo")
        pred = _EMPHASIS.sub("", found[-1].strip())
    boxed = last_boxed(pred)
    pred = pred if boxed is None else boxed
    right = answers_equal(pred, request["label"], algebra)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def _f1(response: str, request: dict[str, Any], algebra: Algebra) -> float:
    if request["boxed"]:
        response = _TEXT_COMMAND.sub(r"\1", response)
    return max(overlap.f1(response, label) for label in request["label"])


def _gpqa(response: str, request: dict[str, Any], algebra: Algebra) -> float:
    rest = after_thinking(response)
    return float(multiple_choice.is_right(response if rest is None else rest, request["question"]))


def _ifeval(response: str, request: dict[str, Any], algebra: Algebra) -> float:
    rest = after_thinking(response)
    return float(all(instructions.followed(response if rest is None else rest, request["instructions"])))


_RULES: dict[str, Callable[[str, dict[str, Any], Algebra], float | dict[str, Any]]] = {
    "math": _math,
    "deepscaler": _deepscaler,
    "dapo": _dapo,
    "f1": _f1,
    "gpqa": _gpqa,
    "ifbench": _ifeval,
    "ifeval": _ifeval,
}
