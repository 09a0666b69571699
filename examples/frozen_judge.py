"""A reward with a frozen model beside the policy: it is asked about the answers that the rule does not accept.

--custom-rm-path examples.frozen_judge.reward --rm-type math --sglang-config FILE, with a frozen model `judge`
"""

from __future__ import annotations

from slime.rollout.sglang_rollout import get_model_url
from slime.utils.http_utils import post

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub import async_rm

SHOWN_CHARS = 500  # of the end of a response, where the answer is
QUESTION = """The right answer to a problem is: {label}
A solution of the problem ends so: {end}
Is its final answer the same? Reply with yes or no."""


async def reward(args: Arguments, sample: Sample) -> float:
    """1 for an answer that is right by the rule of --rm-type or by the judge; its words are kept as metadata."""
    if await async_rm(args, sample) > 0:
        return 1.0
    question = QUESTION.format(label=sample.label, end=sample.response[-SHOWN_CHARS:])
    payload = {
        "model": "judge",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 4,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = await post(get_model_url(args, "judge", "/v1/chat/completions"), payload)
    verdict = answer["choices"][0]["message"]["content"] or ""
    sample.metadata["judge"] = verdict
    return float(verdict.strip().lower().startswith("yes"))
