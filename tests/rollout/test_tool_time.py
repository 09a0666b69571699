"""A conversation with a tool: its time is recorded, and a turn that was complete at an abort is not continued."""

from __future__ import annotations

import asyncio
import time

from slimrl.data.sample import Sample, SampleStatus
from slimrl.engines.protocol import Generation
from slimrl.rollout.generation.multi_turn import NON_GENERATION_TIME, TURN_STARTS, multi_turn_generate

PARAMS = {"stop": None, "max_new_tokens": 40, "skip_special_tokens": False, "spaces_between_special_tokens": False}
TOOL_S, ENGINE_S = 0.02, 0.05


class Tokenizer:
    name_or_path, eos_token_id = "", ord("$")

    def decode(self, token_ids, **_):
        return "".join(map(chr, token_ids))

    def __call__(self, text, **_):
        return {"input_ids": list(map(ord, text))}


class Engine:
    """Calls the tool twice, then ends."""

    def __init__(self, answers=("a=", "b=", "c"), finish_reason="stop"):
        self.answers, self.finish_reason = list(answers), finish_reason

    async def generate(self, tokens, params, session_id=None):
        await asyncio.sleep(ENGINE_S)
        text = self.answers.pop(0)
        return Generation(list(map(ord, text)), [-1.0] * len(text), self.finish_reason, "1", text)


async def tool(call: str) -> str:
    await asyncio.sleep(TOOL_S)
    return "7"


def test_tool_time_is_in_the_sample_metadata():
    sample = Sample("p", tokens=[1, 2])
    started = time.monotonic()
    asyncio.run(
        multi_turn_generate(sample, PARAMS, engine=Engine(), tokenizer=Tokenizer(), tool=tool, stop=["="], max_calls=5)
    )
    taken = time.monotonic() - started
    assert sample.response == "a=7b=7c" and sample.loss_mask == [1, 1, 0, 1, 1, 0, 1]
    assert len(sample.metadata[TURN_STARTS]) == 3
    assert 2 * TOOL_S <= sample.metadata[NON_GENERATION_TIME] <= taken - 3 * ENGINE_S


def test_turn_aborted_after_its_stop_string_calls_the_tool():
    engine, sample = Engine(["a=", "b$"], finish_reason="abort"), Sample("p", tokens=[1, 2])
    asyncio.run(
        multi_turn_generate(sample, PARAMS, engine=engine, tokenizer=Tokenizer(), tool=tool, stop=["="], max_calls=5)
    )
    assert sample.response == "a=7b$" and sample.status is SampleStatus.COMPLETED


def test_aborted_turn_is_continued_and_stops_at_the_stop_string_across_the_abort():
    sample = Sample("p", tokens=[1, 2])
    for answers, reason in ((["a-"], "abort"), (["=x", "c"], "stop")):
        engine = Engine(answers, finish_reason=reason)
        asyncio.run(
            multi_turn_generate(
                sample, PARAMS, engine=engine, tokenizer=Tokenizer(), tool=tool, stop=["-="], max_calls=5
            )
        )
    assert sample.response == "a-=7c" and sample.metadata[TURN_STARTS] == [0, 4]
