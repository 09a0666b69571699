"""Problems with an answer that can be checked, from the columns in which they are published.

Which layout a row has is told by its columns, not by the name of its set: the same set is published in several.
Called by `tools/prepare_data.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.rollout.rm_hub.boxed import last_boxed

INSTRUCTION = "Reason step by step, and give the final answer in \\boxed{}."


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem; `asks_for_form` tells that the prompt says itself in which form it wants the answer."""

    messages: list[dict[str, Any]]
    label: str
    metadata: dict[str, Any]
    asks_for_form: bool


def problem_row(row: dict[str, Any], instruction: str | None) -> dict[str, Any]:
    """`prompt` (messages), `label` and, where there is any, `metadata`.

    `instruction` is put behind the last message; None puts INSTRUCTION behind a bare problem, and nothing elsewhere.
    Raises ValueError for columns of no known layout, and where an answer is missing.
    """
    problem = _problem(row)
    words = ("" if problem.asks_for_form else INSTRUCTION) if instruction is None else instruction
    messages = [dict(message) for message in problem.messages]
    if words:
        messages[-1]["content"] = f"{messages[-1]['content']}\n{words}"
    made = {"prompt": messages, "label": problem.label}
    return {**made, "metadata": problem.metadata} if problem.metadata else made


def _problem(row: dict[str, Any]) -> Problem:
    columns = set(row)
    lower = {key.lower(): value for key, value in row.items()}
    if {"prompt", "reward_model"} <= columns:  # DAPO-Math-17k, AIME-2024 as published for verl
        return Problem(_messages(row["prompt"]), _text(row["reward_model"], "ground_truth"), {}, True)
    for key in ("prompt", "messages"):
        if {key, "label"} <= columns:  # sets published for slime
            return Problem(_messages(row[key]), _text(row, "label"), row.get("metadata") or {}, True)
    if {"problem", "answer"} <= set(lower):  # AIME 2024 in several places
        return Problem(_user(lower["problem"]), _text(lower, "answer"), {}, False)
    if {"problem", "solution"} <= columns:  # MATH
        answer = last_boxed(row["solution"])
        if not answer:
            raise ValueError("its solution has no \\boxed answer")
        metadata = {"subject": row.get("type"), "level": row.get("level")}
        kept = {key: value for key, value in metadata.items() if value is not None}
        return Problem(_user(row["problem"]), answer, kept, False)
    if {"question", "answer"} <= columns:  # GSM8K: the working, then the answer behind four signs
        _, mark, answer = str(row["answer"]).rpartition("####")
        if not mark or not answer.strip():
            raise ValueError("its answer has no part behind ####")
        return Problem(_user(row["question"]), answer.strip().replace(",", ""), {}, False)
    raise ValueError(f"its columns {sorted(columns)} are of no layout known here")


def _user(text: Any) -> list[dict[str, Any]]:
    if not isinstance(text, str) or not text.strip():
        raise ValueError("its problem is empty")
    return [{"role": "user", "content": text.strip()}]


def _messages(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return _user(prompt)
    known = isinstance(prompt, list) and prompt
    if not known or not all(isinstance(part, dict) and {"role", "content"} <= set(part) for part in prompt):
        raise ValueError("its prompt is neither text nor messages")
    return [{"role": part["role"], "content": part["content"]} for part in prompt]


def _text(mapping: Any, key: str) -> str:
    value = mapping.get(key) if isinstance(mapping, dict) else None
    if value is None or not str(value).strip():
        raise ValueError(f"it has no {key}")
    return str(value).strip()
