"""Every rule scores any response or gives it up as a failure, and the same graders continue afterwards."""

import asyncio

import psutil
import pytest

from slimrl.data.reward_registry import REWARDS
from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub import ifeval, registry
from slimrl.rollout.rm_hub.grader_pool import GraderFailure, GraderPool
from tests.rollout.test_reward_registry import EXAMPLES

MEMORY_BYTES = 700 << 20
HOSTILE = {
    "power tower": "9**9**9**9",
    "factorial": "99999999!",
    "polynomial": "(x+1)**99999",
    "exponent tower": "10^{10^{10}}",
    "exponent of digits": "2^{" + "9" * 300 + "}",
    "long number": "7" * 5000,
    "long fraction": "1" * 390 + "/" + "3" * 390,
    "a megabyte of one letter": "x" * 1_000_000,
    "a megabyte of words": "to be, or " * 100_000,
    "open braces": "{" * 100_000,
    "nested braces": "{" * 100_000 + "5" + "}" * 100_000,
    "nested parentheses": "(" * 100_000 + "5" + ")" * 100_000,
    "nested boxes": "\\boxed{" * 300 + "5" + "}" * 300,
    "fractions in fractions": "\\frac{1}{1+" * 200 + "1" + "}" * 200,
    "fractions without parts": "\\frac" * 400,
    "roots without radicands": "\\sqrt" * 380 + "2",
    "control characters": "".join(map(chr, range(32))) * 50 + "5",
    "NUL": "5\x00",
    "half characters": "5\ud800\udc80\ud800",
    "digits of other scripts": "٣५７²Ⅷ",
    "dollars": "$" * 1900,
    "minus signs": "-" * 1200 + "1",
    "joined lists": "1," * 5000,
    "plus or minus": "1\\pm" * 450 + "1",
    "unions": "[1,2]\\cup" * 200 + "[3,4]",
    "sums of units": "2 hours 3 minutes " * 100,
    "open text": "\\text{" * 300,
    "spaces within": "7" + " " * 1900 + "7",
}


@pytest.fixture(scope="module")
def graders():
    pool = GraderPool(time_limit_s=30.0, size=1)
    yield pool
    pool.close()


def ask(rule, text):
    """A sample with `text` where the rule expects the answer."""
    if rule == "dapo":
        return Sample(prompt="q", index=0, response=f"Answer: {text}", label="x+1")
    if rule in ("math", "deepscaler"):
        return Sample(prompt="q", index=0, response=f"so</think>\\boxed{{{text}}}", label="x+1")
    if rule == "gpqa":
        metadata = {"choices": ["one", "two", text[:500] or "three"]}
        return Sample(prompt="q", index=0, response=f"the answer is \\boxed{{{text}}}", label="A", metadata=metadata)
    if rule not in ("f1", "ifeval", "ifbench"):
        label, metadata, *_ = EXAMPLES[rule]
        return Sample(prompt="q", index=0, response=text, label=label, metadata=metadata)
    values = {"num_words": 5, "relation": "at least", "keywords": ["k"], "end_phrase": "bye", "section_spliter": "S"}
    values |= {"num_sections": 2, "num_highlights": 2, "num_bullets": 2, "num_sentences": 3, "language": "en"}
    wanted = [one for one in ifeval.known_instructions() if takes(one, values)]
    metadata = {"instruction_id_list": wanted, "kwargs": [values] * len(wanted)}
    return Sample(prompt="q", index=0, response=text, label="to be or", metadata={} if rule == "f1" else metadata)


def takes(name, values):
    try:
        ifeval.of_metadata({"instruction_id_list": [name], "kwargs": [values]})
    except ValueError:
        return False
    return name != "language:response_language"  # the grader loads its models for each of the answers below


@pytest.mark.parametrize("rule", sorted(row.name for row in REWARDS if row.grader))
def test_every_answer_is_scored_or_given_up_and_the_grader_survives(rule, graders):
    async def main():
        await graders.grade({"rule": "math", "boxed": True, "response": "\\boxed{x+x}", "label": "2x"})
        (worker,) = (child for child in psutil.Process().children() if "grader_pool.py" in " ".join(child.cmdline()))
        given_up = {}
        for name, text in HOSTILE.items():
            sample = ask(rule, text)
            try:
                reward = await registry.grade(rule, sample, graders)
                assert reward == registry.wrong_answer_reward(rule) or rule not in ("math", "deepscaler", "gpqa"), name
                assert not (rule == "dapo" and reward["acc"]), name
            except GraderFailure as failure:
                given_up[name] = str(failure)
            assert worker.is_running() and worker.memory_info().rss < MEMORY_BYTES, name
        assert await graders.grade({"rule": "math", "boxed": True, "response": "\\boxed{x+x}", "label": "2x"})
        return given_up

    given_up = asyncio.run(main())
    assert all(reason.startswith("the grader failed: ") for reason in given_up.values()), given_up
    if rule in ("math", "deepscaler"):
        assert {"factorial", "polynomial", "exponent tower"} <= given_up.keys()
        assert "power tower" not in given_up or "TooLarge" in given_up["power tower"]


def test_answer_with_split_surrogates_is_wrong_and_its_text_readable(graders):
    reward = asyncio.run(registry.grade("dapo", ask("dapo", "5\ud800"), graders))
    assert reward == {"score": -1.0, "acc": False, "pred": "5?"}
