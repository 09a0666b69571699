"""The table of built-in rewards, `REWARDS`: one row for each `--rm-type`.

Used by the flag and its validation (choices, labels, dict rewards, services), the check of prompt data,
`slimrl.rollout.rm_hub.rule_reward`, the grader processes, and docs/rewards.md, whose table is the output of
`python -m slimrl.data.reward_registry`. Functions are given as "module:function" and imported on first use, so that
importing the table imports nothing else. To add a reward, write its grader function and add a row here.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

BOXED_PREFIX = "boxed_"
NO_ANSWER = "[INVALID]"


class GradedBy(Enum):
    """What computes the reward."""

    RULE = "a function of slimrl"
    SERVICE = "the service at --rm-url"
    REWARD_MODEL = "the servers of --rm-model"


@dataclasses.dataclass(frozen=True)
class LabelFormat:
    """The required format of a sample's label."""

    meaning: str  # for the docs
    compared: bool = False  # with the response, so that every row of prompt data must have one
    fault: Callable[[Any], str | None] = lambda label: None  # why a label is invalid; None if it is valid


@dataclasses.dataclass(frozen=True)
class BuiltInReward:
    """One row.

    `grader` takes (response, request, algebra) and runs in a grader process with limits of time and memory. The request
    has "boxed", whether the response is the content of its last box, and the entries of `needs`: each is a field of the
    sample ("prompt", "label", "metadata") or a "module:function" called with the sample, which raises ValueError if the
    sample is unsuitable. `fast_path` takes (sample, request), runs in the rollout's event loop first, and returns the
    reward, or None if a grader is needed.
    """

    name: str
    criterion: str  # for the docs
    reward: str  # for the docs
    label: LabelFormat
    by: GradedBy = GradedBy.RULE
    grader: str = ""  # empty if `fast_path` always returns the reward, or a service or model computes it
    fast_path: str = ""
    needs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    wrong: float | Mapping[str, Any] = 0.0  # reward of a wrong answer, and of one without a score
    boxed: bool = True  # whether there is a variant with the prefix `boxed_`

    @property
    def names(self) -> tuple[str, ...]:
        """The values of `--rm-type` that mean it."""
        return (self.name, BOXED_PREFIX + self.name) if self.boxed else (self.name,)

    @property
    def entries(self) -> tuple[str, ...]:
        """The entries of a dict reward, the one to train on first; empty if the reward is a number."""
        return tuple(self.wrong) if isinstance(self.wrong, Mapping) else ()


@functools.cache
def load(path: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def reward_of(rm_type: str) -> BuiltInReward | None:
    """The row for a value of `--rm-type`; None if it is unknown."""
    return _BY_NAME.get(rm_type)


def known_reward(rm_type: str) -> BuiltInReward:
    """Like `reward_of`, but raises KeyError for an unknown value."""
    return _BY_NAME[rm_type]


def rm_types() -> tuple[str, ...]:
    """Every value of `--rm-type`: plain names, then those with the prefix `boxed_`, then those without that variant."""
    plain = sorted(row.name for row in REWARDS if row.boxed)
    return (*plain, *(BOXED_PREFIX + name for name in plain), *(row.name for row in REWARDS if not row.boxed))


def markdown() -> str:
    """The table of docs/rewards.md."""
    lines = ["| `--rm-type` | criterion | label | reward |", "| --- | --- | --- | --- |"]
    lines += [f"| `{row.name}` | {row.criterion} | {row.label.meaning} | {row.reward} |" for row in REWARDS]
    return "\n".join(lines) + "\n"


def _answer_fault(label: Any) -> str | None:
    if isinstance(label, bool) or not isinstance(label, str | int | float) or str(label).strip() == "":
        return f"the label is {label!r}, but math rewards need the answer as text or number: check --label-key"
    return None


def _texts_fault(label: Any) -> str | None:
    labels = label if isinstance(label, list) else [label]
    if not labels or not all(isinstance(one, str) for one in labels):
        return f"the label is {label!r}, but f1 rewards need text or a list of texts: check --label-key"
    return None


ANSWER = LabelFormat("text or number, may be boxed", compared=True, fault=_answer_fault)
TEXTS = LabelFormat("text, or a list of which the best counts", compared=True, fault=_texts_fault)
CHOICE = LabelFormat("letter, 0-based number of a choice, or its text")
ANY = LabelFormat("any")
NONE = LabelFormat("none")

_RULES = "slimrl.rollout.rm_hub.rule_reward"
_TRUE_ANSWER = {"label": f"{_RULES}:true_answer"}
_INSTRUCTIONS = {"instructions": f"{_RULES}:instructions_of"}

# in the order of the docs
REWARDS = (
    BuiltInReward(
        "math",
        "the last `\\boxed{...}` is equivalent to the label",
        "1 or 0",
        ANSWER,
        grader=f"{_RULES}:math",
        fast_path=f"{_RULES}:last_box",
        needs=_TRUE_ANSWER,
    ),
    BuiltInReward(
        "deepscaler",
        "like `math`, after `</think>` (or `###Response`); wrong without such a marker",
        "1 or 0",
        ANSWER,
        grader=f"{_RULES}:deepscaler",
        fast_path=f"{_RULES}:last_box_after_thinking",
        needs=_TRUE_ANSWER,
    ),
    BuiltInReward(
        "dapo",
        "the last line `Answer: ...` within the last 300 characters, bold, heading or plain; the label need"
        " not be an integer",
        "`{score: 1 or -1, acc, pred}`: set `--reward-key score`",
        ANSWER,
        grader=f"{_RULES}:dapo",
        needs=_TRUE_ANSWER,
        wrong={"score": -1.0, "acc": False, "pred": NO_ANSWER},
    ),
    BuiltInReward(
        "gpqa",
        "the letter of the response's final answer, negated letters excluded; without a letter, the choice that it"
        " spells out",
        "1 or 0",
        CHOICE,
        grader=f"{_RULES}:gpqa",
        needs={"question": f"{_RULES}:question_of"},
    ),
    BuiltInReward(
        "f1",
        "word overlap with the label (SQuAD): 2PR / (P + R)",
        "0 to 1",
        TEXTS,
        grader=f"{_RULES}:best_f1",
        needs={"label": f"{_RULES}:true_texts"},
    ),
    BuiltInReward(
        "ifeval",
        "every instruction in the metadata is followed",
        "1 or 0",
        NONE,
        grader=f"{_RULES}:follows_instructions",
        needs=_INSTRUCTIONS,
    ),
    BuiltInReward(
        "ifbench",
        "like `ifeval`",
        "1 or 0",
        NONE,
        grader=f"{_RULES}:follows_instructions",
        needs=_INSTRUCTIONS,
    ),
    BuiltInReward("remote_rm", "the service at `--rm-url`", "its reply", ANY, by=GradedBy.SERVICE),
    BuiltInReward(
        "reward_model",
        "a reward model served by SGLang",
        "its logit",
        NONE,
        by=GradedBy.REWARD_MODEL,
        boxed=False,
    ),
    BuiltInReward(
        "zero",
        "none: for training on a teacher alone (`--use-opd`)",
        "0",
        NONE,
        fast_path=f"{_RULES}:zero",
        boxed=False,
    ),
    BuiltInReward("random", "a coin flip, reproducible per sample", "1 or 0", NONE, fast_path=f"{_RULES}:coin_flip"),
)
_BY_NAME = {name: row for row in REWARDS for name in row.names}

if __name__ == "__main__":
    print(markdown(), end="")
