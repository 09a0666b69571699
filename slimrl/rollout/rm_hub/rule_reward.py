"""Grading by the rows of `slimrl.data.reward_registry`: builds the request, tries the fast path, then calls a grader.

With the prefix `boxed_` the content of the last `\\boxed{...}` is graded instead of the response. The rows' functions
that run in the rollout process are here: those that extract a grader's inputs from a sample, and the fast paths.
"""

from __future__ import annotations

import re
from typing import Any

from slimrl.data.reward_registry import BOXED_PREFIX, REWARDS, GradedBy, known_reward, load, reward_of
from slimrl.data.sample import Sample
from slimrl.engines.protocol import sampling_seed
from slimrl.rollout.rm_hub import ifeval, rule_graders
from slimrl.rollout.rm_hub.grader_pool import GraderPool
from slimrl.rollout.rm_hub.rule_graders import last_boxed

Reward = float | dict[str, Any]

_SHORT_BOX = re.compile(r"\\(?:boxed|fbox)\{([^{}\\]{1,64})\}")
_WHOLE = re.compile(r"-?[0-9]{1,18}")


async def grade(rm_type: str, sample: Sample, graders: GraderPool) -> Reward:
    """The reward of a built-in rule. Raises GraderFailure if the grader returns no score, ValueError on a bad label."""
    request = request_of(rm_type, sample)
    reward = fast_path_reward(rm_type, sample, request)
    return (await graders.grade(request))["value"] if reward is None else reward


def request_of(rm_type: str, sample: Sample) -> dict[str, Any]:
    """The request for a grader. Raises ValueError if the label or another field is unsuitable for the rule."""
    row = known_reward(rm_type)
    if (fault := row.label.fault(sample.label)) is not None:
        raise ValueError(fault)
    needs = {name: load(of)(sample) if ":" in of else getattr(sample, of) for name, of in row.needs.items()}
    return {"rule": row.name, "boxed": rm_type != row.name, "response": sample.response, **needs}


def fast_path_reward(rm_type: str, sample: Sample, request: dict[str, Any]) -> float | None:
    """The reward by the rule's fast path; None if a grader has to decide."""
    row = known_reward(rm_type)
    reward = load(row.fast_path)(sample, request) if row.fast_path else None
    return None if reward is None else float(reward)


def wrong_answer_reward(rm_type: str) -> Reward:
    """The reward of a wrong answer."""
    return rule_graders.wrong_answer_reward(rm_type)


def scored_text(rm_type: str, response: str) -> str:
    """The graded part of a response: with the prefix `boxed_` the content of its last box, empty without a box."""
    return (last_boxed(response) or "") if rm_type.startswith(BOXED_PREFIX) else response


def graded_by(rm_type: str) -> GradedBy:
    """What computes a built-in reward."""
    return known_reward(rm_type).by


def is_builtin(rm_type: str) -> bool:
    """Whether `rm_type` names a built-in reward."""
    return reward_of(rm_type) is not None


def builtin_types() -> list[str]:
    """The names without prefix, for messages."""
    return sorted(row.name for row in REWARDS)


def fast_match(response: str, label: str, *, thinks: bool) -> bool | None:
    """Whether the last box is right, if comparing two texts or two integers decides it; None if a grader has to.

    With `thinks`, the box must follow the end of the thinking. Takes a few microseconds for any response, so that it
    can run in the rollout's event loop.
    """
    start = max(response.rfind("\\boxed"), response.rfind("\\fbox"))
    box = _SHORT_BOX.match(response, start) if start >= 0 else None
    if box is None or (thinks and not any(0 <= response.rfind(end) < start for end in rule_graders.THINKING_ENDS)):
        return None
    answer, label = box[1].strip(), label.strip()
    if answer == label and answer:
        return True
    return int(answer) == int(label) if _WHOLE.fullmatch(answer) and _WHOLE.fullmatch(label) else None


def last_box(sample: Sample, request: dict[str, Any]) -> bool | None:
    """`fast_match` with the last box at any position."""
    return fast_match(sample.response, request["label"], thinks=False)


def last_box_after_thinking(sample: Sample, request: dict[str, Any]) -> bool | None:
    """`fast_match` with the last box after the thinking, unless only the box is graded."""
    return fast_match(sample.response, request["label"], thinks=not request["boxed"])


def coin_flip(sample: Sample, request: dict[str, Any]) -> float:
    """0 or 1, reproducible per sample."""
    return float(sampling_seed("random reward", sample.index if sample.index is not None else sample.response) % 2)


def zero(sample: Sample, request: dict[str, Any]) -> float:
    """0 for every response."""
    return 0.0


def true_answer(sample: Sample) -> str:
    """The true answer as text; a label may be a number, or have its answer in a box."""
    text = str(sample.label)
    boxed = last_boxed(text)
    return text if boxed is None else boxed


def true_texts(sample: Sample) -> list[str]:
    """The list of labels."""
    return sample.label if isinstance(sample.label, list) else [sample.label]


def question_of(sample: Sample) -> dict[str, Any]:
    """The choices and the right one."""
    return rule_graders.gpqa_question(sample.label, sample.metadata)


def instructions_of(sample: Sample) -> list[dict[str, Any]]:
    """The instructions to follow."""
    return ifeval.of_metadata(sample.metadata)
