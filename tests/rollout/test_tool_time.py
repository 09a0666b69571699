"""A conversation with a tool knows how long it waited for the tool, and not for the engine."""

from __future__ import annotations

import asyncio
import time

from slimrl.data.sample import Sample
from slimrl.engines.protocol import Generation
from slimrl.rollout.generation.multi_turn import NON_GENERATION_TIME, TURN_STARTS, converse

PARAMS = {"stop": None, "max_new_tokens": 40, "skip_special_tokens": False, "spaces_between_special_tokens": False}
TOOL_S, ENGINE_S = 0.02, 0.05


class Tokenizer:
    def decode(self, token_ids, **_):
        return "".join(map(chr, token_ids))

    def __call__(self, text, **_):
        return {"input_ids": list(map(ord, text))}


class Engine:
    """Asks the tool twice, then ends."""

    def __init__(self):
        self.answers = ["a=", "b=", "c"]

    async def generate(self, tokens, params, session_id=None):
        await asyncio.sleep(ENGINE_S)
        text = self.answers.pop(0)
        return Generation(list(map(ord, text)), [-1.0] * len(text), "stop", "1", text)


async def tool(call: str) -> str:
    await asyncio.sleep(TOOL_S)
    return "7"


def test_the_time_in_tools_is_in_the_samples_metadata():
    sample = Sample("p", tokens=[1, 2])
    started = time.monotonic()
    asyncio.run(converse(sample, PARAMS, engine=Engine(), tokenizer=Tokenizer(), tool=tool, stop=["="], max_calls=5))
    taken = time.monotonic() - started
    assert sample.response == "a=7b=7c" and sample.loss_mask == [1, 1, 0, 1, 1, 0, 1]
    assert len(sample.metadata[TURN_STARTS]) == 3
    assert 2 * TOOL_S <= sample.metadata[NON_GENERATION_TIME] <= taken - 3 * ENGINE_S
