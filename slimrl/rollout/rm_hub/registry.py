"""The built-in rewards, by the name `--rm-type` knows them.

| type | what is judged | reward |
| --- | --- | --- |
| `math` | the last `\\boxed{...}` of the response means the same as the label | 1 or 0 |
| `deepscaler` | the same, of what follows `</think>` (or `###Response`); without such a marker it is wrong | 1 or 0 |
| `dapo` | the last line `Answer: ...` within the last 300 characters | `{score: 1 or -1, acc, pred}` |
| `gpqa` | the letter that the response settles on; `metadata.choices` may hold the texts | 1 or 0 |
| `f1` | the words shared with the label, or with the best of several labels | 0 to 1 |
| `ifeval`, `ifbench` | every instruction of `metadata.instruction_id_list` is followed | 1 or 0 |
| `remote_rm` | whatever the service at `--rm-url` says | its answer |
| `reward_model` | the conversation, by the reward model of `--rm-model` | its number |
| `random` | nothing: a coin that is the same for the same sample in every run | 1 or 0 |

With the prefix `boxed_` the content of the last `\\boxed{...}` is judged in place of the response.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from slimrl.arguments.engines import REWARD_MODEL
from slimrl.data.prompt_format import BOXED_PREFIX, NUMBER_OR_TEXT_RULES, TEXT_RULES, label_fault
from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub import ifeval, rule_graders
from slimrl.rollout.rm_hub.grader_pool import GraderPool
from slimrl.rollout.rm_hub.rule_graders import last_boxed
from slimrl.rollout.sampling import sampling_seed

Reward = float | dict[str, Any]

REMOTE = "remote_rm"
MODEL = REWARD_MODEL
RANDOM = "random"

_BOXED_RULES = {"math", "deepscaler"}
_SHORT_BOX = re.compile(r"\\(?:boxed|fbox)\{([^{}\\]{1,64})\}")
_WHOLE = re.compile(r"-?[0-9]{1,18}")


async def grade(rm_type: str, sample: Sample, graders: GraderPool) -> Reward:
    """The reward of a built-in rule. Raises GraderFailure where no verdict was reached, ValueError on a bad label."""
    rule = rm_type.removeprefix(BOXED_PREFIX)
    if rule == RANDOM:
        return float(sampling_seed("random reward", sample.index if sample.index is not None else sample.response) % 2)
    needs = _NEEDS[rule](sample)
    if rule in _BOXED_RULES:
        verdict = fast_match(sample.response, needs["label"], thinks=rm_type == "deepscaler")
        if verdict is not None:
            return float(verdict)
    request = {"rule": rule, "boxed": rm_type != rule, "response": sample.response, **needs}
    return (await graders.grade(request))["value"]


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


def wrong(rm_type: str) -> Reward:
    """The reward of a wrong answer."""
    return rule_graders.wrong(rm_type.removeprefix(BOXED_PREFIX))


def judged_text(rm_type: str, response: str) -> str:
    """What of a response is judged: with the prefix `boxed_` the content of its last box, empty where there is none."""
    return (last_boxed(response) or "") if rm_type.startswith(BOXED_PREFIX) else response


def is_remote(rm_type: str) -> bool:
    """Whether the type asks a service, which `RemoteReward` does."""
    return rm_type.removeprefix(BOXED_PREFIX) == REMOTE


def is_builtin(rm_type: str) -> bool:
    """Whether `rm_type` names a built-in reward."""
    return rm_type == MODEL or rm_type.removeprefix(BOXED_PREFIX) in (*_NEEDS, REMOTE, RANDOM)


def builtin_types() -> list[str]:
    """The names without prefix, for messages."""
    return sorted([*_NEEDS, REMOTE, MODEL, RANDOM])


def _answer(sample: Sample) -> dict[str, Any]:
    """The true answer as text; a label may be a number, or hold its answer in a box."""
    if (fault := label_fault(NUMBER_OR_TEXT_RULES[0], sample.label)) is not None:
        raise ValueError(fault)
    text = str(sample.label)
    boxed = last_boxed(text)
    return {"label": text if boxed is None else boxed}


def _texts(sample: Sample) -> dict[str, Any]:
    if (fault := label_fault(TEXT_RULES[0], sample.label)) is not None:
        raise ValueError(fault)
    return {"label": sample.label if isinstance(sample.label, list) else [sample.label]}


def _question(sample: Sample) -> dict[str, Any]:
    return {"question": rule_graders.question(sample.label, sample.metadata)}


def _instructions(sample: Sample) -> dict[str, Any]:
    return {"instructions": ifeval.of_metadata(sample.metadata)}


_NEEDS: dict[str, Callable[[Sample], dict[str, Any]]] = {
    "math": _answer,
    "deepscaler": _answer,
    "dapo": _answer,
    "f1": _texts,
    "gpqa": _question,
    "ifbench": _instructions,
    "ifeval": _instructions,
}
