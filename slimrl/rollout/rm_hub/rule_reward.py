"""Grading by rule: from a sample to a grader's request, the fast path, and the graders, pure functions of text.

The rows of `slimrl.data.reward_registry` name the functions here: those that extract a grader's inputs from a sample
and the fast paths, which run in the rollout process, and the graders (response, request, algebra), which run in a
grader process. With the prefix `boxed_` the content of the last `\\boxed{...}` is graded instead of the response.

Multiple choice is as in GPQA: the letter of the final answer, or the choice that the response spells out. Word overlap
is the F1 score of SQuAD (Rajpurkar et al., 2016).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from slimrl.data.reward_registry import BOXED_PREFIX, REWARDS, GradedBy, known_reward, load, reward_of
from slimrl.data.sample import Sample
from slimrl.engines.protocol import sampling_seed
from slimrl.rollout.rm_hub import ifeval
from slimrl.rollout.rm_hub.choice_letters import Statement, statements
from slimrl.rollout.rm_hub.grader_pool import GraderPool
from slimrl.rollout.rm_hub.math_equivalence import answers_equal

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
    """The names without prefix."""
    return sorted(row.name for row in REWARDS)


def fast_match(response: str, label: str, *, thinks: bool) -> bool | None:
    """Whether the last box is right, if comparing two texts or two integers decides it; None if a grader has to.

    With `thinks`, the box must follow the end of the thinking. Takes a few microseconds for any response, so that it
    can run in the rollout's event loop.
    """
    start = max(response.rfind("\\boxed"), response.rfind("\\fbox"))
    box = _SHORT_BOX.match(response, start) if start >= 0 else None
    if box is None or (thinks and not any(0 <= response.rfind(end) < start for end in THINKING_ENDS)):
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
    return gpqa_question(sample.label, sample.metadata)


def instructions_of(sample: Sample) -> list[dict[str, Any]]:
    """The instructions to follow."""
    return ifeval.of_metadata(sample.metadata)


_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = {"yes", "no", "noanswer"}


def f1(answer: str, label: str) -> float:
    """2 PR / (P + R) over the words of both, counted with repeats, in [0, 1].

    Case, punctuation and articles do not count. If one side is just yes, no or noanswer, the other must be the same.
    """
    words, expected = normalized(answer), normalized(label)
    if words == expected:
        return 1.0
    if {" ".join(words), " ".join(expected)} & _CLOSED:
        return 0.0
    shared = sum((Counter(words) & Counter(expected)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(words), shared / len(expected)
    return 2 * precision * recall / (precision + recall)


def normalized(text: str) -> list[str]:
    """The words in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


_UNBRACED = re.compile(r"[^\s$]+?(?=\\[)\]]|[\s$]|$)")
_SPECIAL_TOKEN = re.compile(r"(?:<[|｜][^<>|｜\s]{1,40}[|｜]>|</s>|<eos>|<end_of_turn>)$")
_END_CHARS = 1000
_MARKERS = ("\\boxed", "\\fbox")


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` or `\\fbox{...}` (or `\\boxed 5`, `\\boxed5`); None if there is none.

    An unclosed last box (a truncated response) counts as no answer. Time is linear in the text.
    """
    start, marker = max((text.rfind(marker), marker) for marker in _MARKERS)
    if start < 0:
        return None
    after = text[start + len(marker) :]
    rest = after.lstrip()
    if not rest.startswith("{"):
        # with letters after the marker it is another command
        word = None if after[:1].isalpha() else _UNBRACED.match(rest)
        return None if word is None else word[0]
    depth = 0
    for position, character in enumerate(rest):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return rest[1:position].strip()
    return None


def without_special_tokens(text: str) -> str:
    """The text without special tokens at its end, such as `<|im_end|>`."""
    start, end = text[:-_END_CHARS], text[-_END_CHARS:].rstrip()
    while (token := _SPECIAL_TOKEN.search(end)) is not None:
        end = end[: token.start()].rstrip()
    return start + end


LETTERS = "ABCDEFGHIJ"
_ALONE = re.compile(r"[\s*_`$(\[{]*(?:\\text\{)?\(?([A-Za-z])[)\]}.:*_`$\s]*")
_LEADING = re.compile(r"\s{0,9}\(?([A-Z])[).:]\s+\S")
_PARENTHESISED = re.compile(r"\(([A-Z])\)")
_POINTED_AT = re.compile(r"(?:^|[:=→;,—–-])[\s*(]*([B-HJ])[)*]*[.!]?\s*$")


def gpqa_question(label: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """The grading inputs of a sample: `letters` in use, the right `letter`, and the `choices` by letter.

    The right answer is `metadata.correct_letter`, or the label: a letter, the number of a choice from 0, or a choice's
    text. Choices are `metadata.choices`, a list or a dict by letter. Raises ValueError if the label matches no choice.
    """
    choices = metadata.get("choices") or []
    if not isinstance(choices, dict):
        choices = dict(zip(LETTERS, map(str, choices), strict=False))
    letters = metadata.get("valid_letters") or list(choices) or list(LETTERS[:8])
    letters = [str(letter).upper() for letter in letters]
    letter = _right_letter(metadata.get("correct_letter", label), letters, choices)
    if letter is None:
        raise ValueError(
            f"the label is {label!r}, but gpqa rewards need one of the letters {', '.join(letters)}, the number of a"
            " choice or its text (metadata.choices): check --label-key and --metadata-key"
        )
    return {"letters": letters, "letter": letter, "choices": choices}


def is_correct_choice(response: str, question: dict[str, Any]) -> bool:
    """Whether the response chooses the right letter, or, without a letter, spells out the right choice and no other."""
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
    """The chosen letter, from the first of: the last box, a last line that is just a letter, the letter that the text
    last calls the answer without retracting it, the last letter in parentheses or at the end of the last line that the
    text does not deny. None if there is none.
    """
    boxed = last_boxed(response)
    for pattern in (_ALONE, _LEADING):
        text = boxed or ""
        match = pattern.match(text)
        if match is not None and match[1].upper() in letters and (pattern is _LEADING or match.end() == len(text)):
            return match[1].upper()
    response = without_special_tokens(response)
    lines = [line for line in response.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if (match := _ALONE.fullmatch(last)) and match[1].upper() in letters:
        return match[1].upper()
    found_statements = statements(response, letters)
    settled, denied = _settled(found_statements)
    if settled is not None:
        return settled
    if any(statement.says == "open" for statement in found_statements[-1:]):
        return None
    for pattern, text in ((_PARENTHESISED, response), (_LEADING, last), (_POINTED_AT, last)):
        found = [letter for letter in pattern.findall(text) if letter in letters]
        if found:
            return found[-1] if found[-1] not in denied else None
    return None


def _settled(found: list[Statement]) -> tuple[str | None, set[str]]:
    """The letter last called the answer and not retracted, and the letters last called not the answer.

    A letter that is only called true or false does not replace one called the answer, unless that was retracted.
    """
    settled, weight, denied = None, 0, set()
    for statement in found:
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


Algebra = Callable[[str, str], bool]
DAPO_TAIL_CHARS = 300
THINKING_ENDS = ("</think>", "###Response")
_ANSWER_LINE = re.compile(r"(?i)answer[\s*_]*[:：][\s*_`]*([^\n]+)")
# emphasis is not part of an answer; between two values `**` is a power
_EMPHASIS = re.compile(r"(?<![\w)}])\*\*|\*\*(?![\w({\\])|^[*_`\s]+|[*_`\s]+$")
_TEXT_COMMAND = re.compile(r"\\text[a-z]*\s*\{([^{}]*)\}")


def grade_request(request: dict[str, Any], algebra: Algebra) -> Reward:
    """The reward of `request["response"]` by `request["rule"]`.

    With `boxed` only the content of its last box is graded, and a response without one is wrong.
    """
    response = request["response"]
    if request["boxed"]:
        response = last_boxed(response)
        if response is None:
            return wrong_answer_reward(request["rule"])
    return load(known_reward(request["rule"]).grader)(response, request, algebra)


def load_graders() -> None:
    """Imports every grader, so that imports do not count towards an answer's time limit."""
    for row in REWARDS:
        if row.grader:
            load(row.grader)


def wrong_answer_reward(rule: str) -> Reward:
    """The reward of an answer that is wrong, missing, or without a score."""
    reward = known_reward(rule).wrong
    return dict(reward) if isinstance(reward, Mapping) else reward


def after_thinking(response: str) -> str | None:
    """The text after the last end-of-thinking marker; None without such a marker."""
    for marker in THINKING_ENDS:
        _, found, rest = response.rpartition(marker)
        if found:
            return rest
    return None


def math(response: str, request: dict[str, Any], algebra: Algebra) -> float:
    """1.0 if the last box is equivalent to the label."""
    answer = response if request["boxed"] else last_boxed(response)
    return float(answer is not None and answers_equal(answer, request["label"], algebra))


def deepscaler(response: str, request: dict[str, Any], algebra: Algebra) -> float:
    """`math` of the text after the thinking."""
    if not request["boxed"]:
        response = after_thinking(response) or ""
    return math(response, request, algebra)


def dapo(response: str, request: dict[str, Any], algebra: Algebra) -> float | dict[str, Any]:
    """Grades the last answer line against the label."""
    if request["boxed"]:
        pred = response.strip()
    else:
        found = _ANSWER_LINE.findall(without_special_tokens(response[-DAPO_TAIL_CHARS:]))
        if not found:
            return wrong_answer_reward("dapo")
        pred = _EMPHASIS.sub("", found[-1].strip())
    boxed = last_boxed(pred)
    pred = pred if boxed is None else boxed
    right = answers_equal(pred, request["label"], algebra)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def best_f1(response: str, request: dict[str, Any], algebra: Algebra) -> float:
    """The best `f1` over the labels."""
    if request["boxed"]:
        response = _TEXT_COMMAND.sub(r"\1", response)
    return max(f1(response, label) for label in request["label"])


def gpqa(response: str, request: dict[str, Any], algebra: Algebra) -> float:
    """1.0 if the right choice is the answer after the thinking."""
    rest = after_thinking(response)
    return float(is_correct_choice(response if rest is None else rest, request["question"]))


def follows_instructions(response: str, request: dict[str, Any], algebra: Algebra) -> float:
    """1.0 if the text after the thinking follows every instruction."""
    rest = after_thinking(response)
    return float(all(ifeval.followed(response if rest is None else rest, request["instructions"])))
