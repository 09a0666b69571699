"""Grading by the rows of `slimrl.data.reward_table`: packs what a rule needs, tries its fast path, asks a grader.

With the prefix `boxed_` the content of the last `\\boxed{...}` is judged in place of the response. The functions that
rows name for the driver's side are here: what a grader gets of a sample, and rewards without a grader.
"""

from __future__ import annotations

import re
from typing import Any

from slimrl.data.reward_table import BOXED_PREFIX, REWARDS, GradedBy, load, reward_of
from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub import ifeval, rule_graders
from slimrl.rollout.rm_hub.grader_pool import GraderPool
from slimrl.rollout.rm_hub.rule_graders import last_boxed
from slimrl.rollout.sampling import sampling_seed

Reward = float | dict[str, Any]

_SHORT_BOX = re.compile(r"\\(?:boxed|fbox)\{([^{}\\]{1,64})\}")
_WHOLE = re.compile(r"-?[0-9]{1,18}")


async def grade(rm_type: str, sample: Sample, graders: GraderPool) -> Reward:
    """The reward of a built-in rule. Raises GraderFailure where no score was reached, ValueError on a bad label."""
    request = request_of(rm_type, sample)
    verdict = at_first_sight(rm_type, sample, request)
    return (await graders.grade(request))["value"] if verdict is None else verdict


def request_of(rm_type: str, sample: Sample) -> dict[str, Any]:
    """What a grader gets. Raises ValueError where the label or another field does not suit the rule."""
    row = reward_of(rm_type)
    if (fault := row.label.fault(sample.label)) is not None:
        raise ValueError(fault)
    needs = {name: load(of)(sample) if ":" in of else getattr(sample, of) for name, of in row.needs.items()}
    return {"rule": row.name, "boxed": rm_type != row.name, "response": sample.response, **needs}


def at_first_sight(rm_type: str, sample: Sample, request: dict[str, Any]) -> float | None:
    """The reward by the rule's fast path; None where a grader has to decide."""
    row = reward_of(rm_type)
    verdict = load(row.fast_path)(sample, request) if row.fast_path else None
    return None if verdict is None else float(verdict)


def wrong(rm_type: str) -> Reward:
    """The reward of a wrong answer."""
    return rule_graders.wrong(rm_type)


def judged_text(rm_type: str, response: str) -> str:
    """What of a response is judged: with the prefix `boxed_` the content of its last box, empty where there is none."""
    return (last_boxed(response) or "") if rm_type.startswith(BOXED_PREFIX) else response


def graded_by(rm_type: str) -> GradedBy:
    """Who judges by a built-in reward."""
    return reward_of(rm_type).by


def is_builtin(rm_type: str) -> bool:
    """Whether `rm_type` names a built-in reward."""
    return reward_of(rm_type) is not None


def builtin_types() -> list[str]:
    """The names without prefix, for messages."""
    return sorted(row.name for row in REWARDS)


def fast_match(response: str, label: str, *, thinks: bool) -> bool | None:
    """Whether the last box is right, where that takes no more than comparing two texts or two whole numbers.

    None where it takes more; then a grader decides. `thinks` says that the box has to follow the end of the thinking.
    A few microseconds whatever the response is, so that it may run where the rollout runs.
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
    """`fast_match` of a response whose last box may stand anywhere."""
    return fast_match(sample.response, request["label"], thinks=False)


def last_box_after_thinking(sample: Sample, request: dict[str, Any]) -> bool | None:
    """`fast_match` of a response whose last box has to follow its thinking, unless the box alone is judged."""
    return fast_match(sample.response, request["label"], thinks=not request["boxed"])


def coin_flip(sample: Sample, request: dict[str, Any]) -> float:
    """0 or 1, the same for the same sample in every run."""
    return float(sampling_seed("random reward", sample.index if sample.index is not None else sample.response) % 2)


def true_answer(sample: Sample) -> str:
    """The true answer as text; a label may be a number, or hold its answer in a box."""
    text = str(sample.label)
    boxed = last_boxed(text)
    return text if boxed is None else boxed


def true_texts(sample: Sample) -> list[str]:
    """The label, or all of them."""
    return sample.label if isinstance(sample.label, list) else [sample.label]


def question_of(sample: Sample) -> dict[str, Any]:
    """The choices and the right one."""
    return rule_graders.question(sample.label, sample.metadata)


def instructions_of(sample: Sample) -> list[dict[str, Any]]:
    """The instructions to follow."""
    return ifeval.of_metadata(sample.metadata)
