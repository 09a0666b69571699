"""Row layouts of published datasets: preference pairs, labelled answers, and problems with a verifiable answer.

A pair becomes `prompt` (messages that end with the user's), `chosen` and `rejected` (assistant texts), and `margin` if
its answers have scores: that of the preferred answer less the other one. A labelled answer becomes `prompt`,
`completion` (assistant text) and `label`, true for a desirable one. A problem becomes `prompt`, `label` and `metadata`.
The columns determine the layout, not the name of the dataset: a dataset may be published in several layouts.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

from slimrl.data.images import PLACEHOLDER
from slimrl.rollout.rm_hub.rule_reward import last_boxed

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant", "prompter": "user", "human": "user", "gpt": "assistant"}


# columns of the scores of the preferred and the other answer: UltraFeedback (binarized; argilla's), WebGPT by place
_SCORES = (("score_chosen", "score_rejected"), ("chosen-rating", "rejected-rating"), ("score_0", "score_1"))


class SkippedRowError(ValueError):
    """A valid row that does not say which answer is better."""


Pair = dict[str, Any]
Messages = list[dict[str, Any]]


def preference_row(row: dict[str, Any]) -> Pair:
    """The pair of one row, with the margin of its scores.

    Raises SkippedRowError for a tie, ValueError for a bad row.
    """
    pair = _unscored(row)
    scores = next((names for names in _SCORES if set(names) <= set(row)), None)
    if scores is None or any(row[name] is None for name in scores):
        return pair
    better, worse = (_score(row, name) for name in scores)
    return pair | {"margin": abs(better - worse) if scores[0] == "score_0" else better - worse}


def _score(row: dict[str, Any], name: str) -> float:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"its {name} is {value!r}, not a finite number")
    return float(value)


def _unscored(row: dict[str, Any]) -> Pair:
    columns = set(row)
    if {"question", "answer_0", "answer_1", "score_0", "score_1"} <= columns:
        return _comparison(row)
    if {"conversation_a", "conversation_b", "winner"} <= columns:
        return _arena(row)
    if {"conversations", "chosen", "rejected"} <= columns:
        return _spoken(row)
    if {"instruction", "chosen", "rejected"} <= columns:
        texts = [row["instruction"], row.get("input")]
        question = "\n".join(text for text in texts if isinstance(text, str) and text.strip())
        return _pair([{"role": "user", "content": question}], row["chosen"], row["rejected"])
    if {"chosen", "rejected"} <= columns:
        return _chosen(row)
    raise ValueError(f"its columns {sorted(columns)} match no known layout")


def is_tree(row: dict[str, Any]) -> bool:
    """True for a message of a conversation tree (oasst), whose pairs span several rows."""
    return {"message_id", "parent_id", "role", "text", "rank"} <= set(row)


def tree_pairs(rows: list[dict[str, Any]]) -> Iterator[Pair]:
    """The best answer to each message of the trees, paired with each lower-ranked answer (rank 0 is the best)."""
    by_id = {row["message_id"]: row for row in rows}
    answers: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["role"] == "assistant" and row["rank"] is not None and row["parent_id"] in by_id:
            answers.setdefault(row["parent_id"], []).append(row)
    for parent, ranked in answers.items():
        best, *others = sorted(ranked, key=lambda row: row["rank"])
        for other in others:
            if other["rank"] > best["rank"]:
                yield _pair(_path(by_id, parent), best["text"], other["text"])


def is_labelled(row: dict[str, Any]) -> bool:
    """True for one answer with a label, as published for KTO (kto-mix-14k)."""
    return {"prompt", "completion", "label"} <= set(row)


def labelled_row(row: dict[str, Any]) -> dict[str, Any]:
    """The answer of one row and its label. Raises ValueError for a bad row."""
    if not isinstance(row["label"], bool):
        raise ValueError(f"its label is {row['label']!r}, not true or false")
    prompt = _clean(_user(row["prompt"]) if isinstance(row["prompt"], str) else row["prompt"])
    answer = row["completion"]
    if isinstance(answer, list):
        if len(answer) != 1 or answer[0]["role"] != "assistant":
            raise ValueError("its completion is not one message of the assistant")
        answer = answer[0]["content"]
    if prompt[-1]["role"] != "user":
        raise ValueError(f"its prompt ends with the {prompt[-1]['role']}")
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError("its completion is empty")
    return {"prompt": prompt, "completion": answer.strip(), "label": row["label"]}


def answers_of_pair(pair: Pair) -> Iterator[dict[str, Any]]:
    """The preferred answer as a desirable one, the rejected answer as an undesirable one."""
    for side, desirable in (("chosen", True), ("rejected", False)):
        yield {"prompt": pair["prompt"], "completion": pair[side], "label": desirable}


def _path(by_id: dict[str, dict[str, Any]], message_id: str) -> Messages:
    messages: Messages = []
    current: str | None = message_id
    while current is not None:
        row = by_id[current]
        messages.insert(0, {"role": _ROLES.get(row["role"], row["role"]), "content": row["text"]})
        current = row["parent_id"] if row["parent_id"] in by_id else None
    return messages


def _comparison(row: dict[str, Any]) -> Pair:
    """WebGPT comparisons: two answers to a question, each with a score."""
    question = row["question"]["full_text"] if isinstance(row["question"], dict) else row["question"]
    if row["score_0"] == row["score_1"]:
        raise SkippedRowError("a tie")
    better, worse = ("0", "1") if row["score_0"] > row["score_1"] else ("1", "0")
    return _pair([{"role": "user", "content": question}], row[f"answer_{better}"], row[f"answer_{worse}"])


def _arena(row: dict[str, Any]) -> Pair:
    """Chatbot arena: two conversations with the same first question, and which one a person preferred."""
    if row["winner"] not in ("model_a", "model_b"):
        raise SkippedRowError("a tie")
    sides = {"model_a": row["conversation_a"], "model_b": row["conversation_b"]}
    winner = sides.pop(row["winner"])
    (loser,) = sides.values()
    if len(winner) != 2 or len(loser) != 2:
        raise SkippedRowError("a conversation of several turns without a preference per turn")
    if winner[0]["content"] != loser[0]["content"]:
        raise ValueError("its two conversations begin with different questions")
    return _pair(_clean(winner[:1]), winner[1]["content"], loser[1]["content"])


def _spoken(row: dict[str, Any]) -> Pair:
    """ShareGPT's messages, as LLaMA-Factory reads them: `from` and `value`, each answer one message."""
    messages = [{"role": _ROLES.get(part["from"], part["from"]), "content": part["value"]} for part in _parts_of(row)]
    answers = [row[side]["value"] if isinstance(row[side], dict) else row[side] for side in ("chosen", "rejected")]
    return _pair(messages, *answers)


def _parts_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    found = row["conversations"]
    if not isinstance(found, list) or not found:
        raise ValueError("it has no prompt")
    return found


def _chosen(row: dict[str, Any]) -> Pair:
    """hh-rlhf (two transcripts), UltraFeedback and others (two lists of messages), or prompt and two texts."""
    chosen, rejected = row["chosen"], row["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        if _TURN.match(chosen) is None or "prompt" in row:
            prompt = row.get("prompt")
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return _pair(_clean(messages), chosen, rejected)
        chosen, rejected = _transcript(chosen), _transcript(rejected)
    if not isinstance(chosen, list) or not isinstance(rejected, list) or not chosen or not rejected:
        raise ValueError("its chosen and rejected are neither texts nor messages")
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    prompt = chosen[: len(chosen) - 1]
    if len(chosen) != len(rejected) or common < len(prompt):
        # conversational datasets may have the prompt in another column and only the answers here
        if isinstance(row.get("prompt"), list) and len(chosen) == len(rejected) == 1:
            return _pair(_clean(row["prompt"]), chosen[0]["content"], rejected[0]["content"])
        raise ValueError("its two conversations differ before their last answer")
    if not prompt and row.get("prompt"):
        given = row["prompt"]
        prompt = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return _pair(_clean(prompt), chosen[-1]["content"], rejected[-1]["content"])


def _transcript(text: str) -> Messages:
    """`\\n\\nHuman: ...\\n\\nAssistant: ...` as messages."""
    _, *parts = _TURN.split(text)
    return [
        {"role": _ROLES[role], "content": content.strip()}
        for role, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def _clean(messages: Any) -> Messages:
    known = isinstance(messages, list) and messages
    if not known or not all(isinstance(part, dict) and {"role", "content"} <= set(part) for part in messages):
        raise ValueError("it has no prompt")
    return [{"role": part["role"], "content": part["content"]} for part in messages]


def _pair(prompt: Messages, chosen: Any, rejected: Any) -> Pair:
    texts = [text.strip() if isinstance(text, str) else "" for text in (chosen, rejected)]
    if prompt[-1]["role"] != "user":
        raise ValueError(f"its prompt ends with the {prompt[-1]['role']}")
    if not all(texts):
        raise ValueError("one of its two answers is empty")
    if texts[0] == texts[1]:
        raise SkippedRowError("two equal answers")
    return {"prompt": prompt, "chosen": texts[0], "rejected": texts[1]}


INSTRUCTION = "Reason step by step, and give the final answer in \\boxed{}."


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem; `has_instruction` is True if the prompt itself specifies the answer format."""

    messages: list[dict[str, Any]]
    label: str
    metadata: dict[str, Any]
    has_instruction: bool


def problem_row(row: dict[str, Any], instruction: str | None) -> dict[str, Any]:
    """`prompt` (messages), `label` and, if any, `metadata` and `images`.

    `instruction` is appended to the last message; None appends INSTRUCTION to problems without one of their own.
    Raises ValueError for columns of an unknown layout, and for a missing answer.
    """
    problem = _problem(row)
    suffix = ("" if problem.has_instruction else INSTRUCTION) if instruction is None else instruction
    messages = [dict(message) for message in problem.messages]
    if suffix:
        messages[-1]["content"] = f"{messages[-1]['content']}\n{suffix}"
    converted: dict[str, Any] = {"prompt": messages, "label": problem.label}
    converted |= {"metadata": problem.metadata} if problem.metadata else {}
    return converted | ({"images": _images(row["images"], messages)} if row.get("images") else {})


def _images(images: Any, messages: Messages) -> list[dict[str, str]]:
    """The images of a row (geo3k) as objects with base64 `bytes`, each of which has its <image> in the messages.

    Raises ValueError for an image that is not in the row, and for another number of places.
    """
    found = []
    for image in images:
        stored = image.get("bytes") if isinstance(image, dict) else image
        if not isinstance(stored, bytes):
            raise ValueError("its images are not stored in the row")
        found.append({"bytes": base64.b64encode(stored).decode("ascii")})
    places = sum(str(message["content"]).count(PLACEHOLDER) for message in messages)
    if places != len(found):
        raise ValueError(f"it has {len(found)} images and {places} places for them ({PLACEHOLDER})")
    return found


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
    if {"question", "answer"} <= columns:  # GSM8K: the solution, then the answer after ####
        _, mark, answer = str(row["answer"]).rpartition("####")
        if not mark or not answer.strip():
            raise ValueError("its answer has no part after ####")
        return Problem(_user(row["question"]), answer.strip().replace(",", ""), {}, False)
    raise ValueError(f"its columns {sorted(columns)} match no known layout")


def _user(text: Any) -> list[dict[str, Any]]:
    if not isinstance(text, str) or not text.strip():
        raise ValueError("its prompt is empty")
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
