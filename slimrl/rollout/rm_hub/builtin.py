"""The built-in rewards, by the name `--rm-type` knows them: 1.0 for a right answer, 0.0 for any other.

| type | the answer is |
| --- | --- |
| `math` | the last `\\boxed{...}` of the response |
| `deepscaler` | the last `\\boxed{...}` after `</think>` (or `###Response`); without such a marker there is none |
| `random` | not looked at: 0 or 1 by a coin that is the same for the same sample in every run |

With the prefix `boxed_` the answer is the last `\\boxed{...}` wherever it stands.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub.answers import compare
from slimrl.rollout.rm_hub.boxed import last_boxed
from slimrl.rollout.rm_hub.grader_pool import GraderPool
from slimrl.rollout.sampling import sampling_seed

Reward = Callable[[Sample, str | None, GraderPool], Awaitable[float]]

BOXED_PREFIX = "boxed_"
_THINKING_ENDS = ("</think>", "###Response")


async def grade(rm_type: str, sample: Sample, graders: GraderPool) -> float:
    """The reward of a built-in type. Raises GraderFailure where no verdict was reached, ValueError on a bad label."""
    if rm_type.startswith(BOXED_PREFIX):
        return await _BUILTIN[rm_type.removeprefix(BOXED_PREFIX)](sample, last_boxed(sample.response), graders)
    answer = last_boxed(after_thinking(sample.response) if rm_type == "deepscaler" else sample.response)
    return await _BUILTIN[rm_type](sample, answer, graders)


def is_builtin(rm_type: str) -> bool:
    """Whether `rm_type` names a built-in reward."""
    return rm_type.removeprefix(BOXED_PREFIX) in _BUILTIN


def builtin_types() -> list[str]:
    """The names without prefix, for messages."""
    return sorted(_BUILTIN)


def after_thinking(response: str) -> str:
    """What follows the last end-of-thinking marker; empty where the response never ends its thinking."""
    for marker in _THINKING_ENDS:
        _, found, rest = response.rpartition(marker)
        if found:
            return rest
    return ""


async def answers_equal(answer: str, label: str, graders: GraderPool) -> bool:
    """Whether two answers mean the same: by spelling or as rationals, else by computer algebra (math-verify)."""
    verdict = compare(answer, label)
    if verdict is None:
        verdict = (await graders.grade({"answer": answer, "label": label}))["equal"]
    return verdict


async def _math(sample: Sample, answer: str | None, graders: GraderPool) -> float:
    label = _label_answer(sample)
    return float(answer is not None and await answers_equal(answer, label, graders))


async def _random(sample: Sample, answer: str | None, graders: GraderPool) -> float:
    return float(sampling_seed("random reward", sample.index if sample.index is not None else sample.response) % 2)


def _label_answer(sample: Sample) -> str:
    """The true answer as text; a label may be a number, or hold its answer in a box."""
    label = sample.label
    if isinstance(label, bool) or not isinstance(label, str | int | float) or str(label).strip() == "":
        raise ValueError(
            f"the label is {label!r}, and math rewards need the answer as text or number: check --label-key"
        )
    text = str(label)
    boxed = last_boxed(text)
    return text if boxed is None else boxed


_BUILTIN: dict[str, Reward] = {"math": _math, "deepscaler": _math, "random": _random}
