"""Steps of a response, what the process reward model reads for each, and where its reward goes."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from aiohttp import web

from slimrl.data.sample import Sample, SampleStatus
from slimrl.rollout.metrics import sample_metrics
from slimrl.rollout.rm_hub import RewardScorer
from slimrl.rollout.rm_hub.grader_pool import GraderPool
from slimrl.rollout.rm_hub.process_reward import ProcessRewardModel, Step, StepInput, StepSplitter, step_rewards_of
from slimrl.rollout.rm_hub.reward_model import RewardInput, RewardModelError

BREAK = "\n\n"


def sample_of(tokenizer: Any, response: str, mask: list[int] | None = None, *, end: bool = False) -> Sample:
    prompt, ids = tokenizer("1+1=")["input_ids"], tokenizer(response)["input_ids"]
    ids = [*ids, tokenizer.eos_token_id] if end else ids
    return Sample(
        prompt="1+1=",
        index=7,
        tokens=[*prompt, *ids],
        response=response,
        response_length=len(ids),
        loss_mask=mask,
        status=SampleStatus.COMPLETED,
        metadata={},
    )


class FakeServer:
    """Answers /classify of several sequences as SGLang 0.5.20 does, with outputs made of their length."""

    def __init__(self, labels: int = 1) -> None:
        self.asked: list[list[list[int]]] = []
        self._labels = labels

    async def __aenter__(self) -> FakeServer:
        app = web.Application()
        app.router.add_post("/classify", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        rows = (await request.json())["input_ids"]
        self.asked.append(rows)
        return web.json_response([{"embedding": [0.1 * len(row)] * self._labels} for row in rows])


def filled(tokenizer: Any, samples: list[Sample], form: str = "conversation", **changes: Any) -> FakeServer:
    server = FakeServer()

    async def main() -> None:
        async with server:
            read = RewardInput(tokenizer, form, tokenizer.all_special_tokens)
            steps = StepInput(read, StepSplitter(tokenizer, BREAK), changes.get("marker", BREAK))
            model: Any = ProcessRewardModel(
                [server.url], steps, coefficient=changes.get("coefficient", 1.0), labels=1, concurrency=2
            )
            pool = GraderPool(time_limit_s=1.0, size=1)
            scorer = RewardScorer(pool, None, None, of_tokens=model)
            assert scorer.column_of_tokens == "token_rewards"
            try:
                for one in samples:
                    await scorer.score_tokens(one)
            finally:
                scorer.close()

    asyncio.run(main())
    return server


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("a\n\nbc", [("a", 2), ("bc", 4)]),
        ("a\n\nbc\n\n", [("a", 2), ("bc", 6)]),  # the end of the response is no step of its own
        ("\n\na\n\n\n\nb", [("a", 4), ("b", 7)]),  # nothing between separators is no step
        ("no separator", [("no separator", 11)]),
        ("äö\n\n€", [("äö", 5), ("€", 8)]),  # a token per byte
        ("\N{REPLACEMENT CHARACTER}a\n\nb", [("\N{REPLACEMENT CHARACTER}a", 5), ("b", 6)]),
        ("  \n\n ", []),
        ("", []),
    ],
)
def test_steps_end_with_the_token_that_ends_their_separator(response: str, expected: Any, tokenizer: Any):
    splitter = StepSplitter(tokenizer, BREAK)
    assert [(step.text, step.last) for step in splitter.steps(tokenizer(response)["input_ids"])] == expected


def test_separator_within_a_token_and_the_space_before_a_word_are_found():
    """A tokenizer with whole words: its decoding drops the space of a first word."""

    class Words:
        all_special_ids = [9]
        words = ["a", " Step", " 1", ".\n", "\nThen"]

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            assert text == "a"
            return {"input_ids": [0]}

        def decode(self, ids: list[int]) -> str:
            return "".join(self.words[one] for one in ids).removeprefix(" ")

    steps = StepSplitter(Words(), BREAK).steps([1, 2, 3, 4, 1, 9])
    assert steps == [Step(" Step 1.", 3), Step("Then Step", 5)]
    assert StepSplitter(Words(), " Step").steps([2, 1, 4]) == [Step(" 1", 1), Step("\nThen", 2)]


def test_model_reads_every_step_up_to_its_marker_and_the_last_trained_token_has_the_reward(tokenizer: Any):
    masked = [1] * 11
    masked[3:8] = [0] * 5  # a tool's output in the place of the second step
    one, tool = sample_of(tokenizer, "a\n\nbc", end=True), sample_of(tokenizer, "a\n\ntool\n\nbc"[:11], masked)
    server = filled(tokenizer, [one, tool], marker=" #", coefficient=0.5)
    before = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    assert [tokenizer.decode(row) for row in server.asked[0]] == [f"{before}a #", f"{before}a #bc #"]
    assert one.metadata["step_rewards"] == pytest.approx([0.1 * len(row) for row in server.asked[0]])
    values = [0.5 * reward for reward in one.metadata["step_rewards"]]
    assert one.token_rewards == pytest.approx([0, 0, values[0], 0, 0, values[1]])  # the second at the end token
    assert len(tool.metadata["step_rewards"]) == 3
    assert [place for place, value in enumerate(tool.token_rewards or []) if value] == [2, 8, 10]


def test_step_without_a_trained_token_has_a_reward_nowhere(tokenizer: Any):
    one = sample_of(tokenizer, "a\n\nbc\n\nd", [1, 1, 1, 0, 0, 0, 0, 1])
    filled(tokenizer, [one])
    first, _, last = one.metadata["step_rewards"]
    assert one.token_rewards == pytest.approx([0, 0, first, 0, 0, 0, 0, last])


@pytest.mark.parametrize("form", ["tokens", "text"])
def test_other_forms_of_input_continue_the_prompt(form: str, tokenizer: Any):
    one = sample_of(tokenizer, "a\n\nbc")
    server = filled(tokenizer, [one], form)
    last = "bc" if form == "tokens" else "bc\n\n"
    assert [tokenizer.decode(row) for row in server.asked[0]] == ["1+1=a\n\n", f"1+1=a\n\n{last}"]


def test_response_without_steps_and_scored_samples_are_not_sent(tokenizer: Any):
    empty, scored = sample_of(tokenizer, ""), sample_of(tokenizer, "ab")
    scored.token_rewards = [0.0, 1.0]
    server = filled(tokenizer, [empty, scored])
    assert server.asked == [] and empty.token_rewards == [] and scored.token_rewards == [0.0, 1.0]


def test_metrics_are_steps_per_sample_and_their_mean_reward(tokenizer: Any):
    one, other = sample_of(tokenizer, "a"), sample_of(tokenizer, "b")
    one.metadata["step_rewards"], other.metadata["step_rewards"] = [0.5, 1.0, 0.0], [0.1]
    metrics = sample_metrics([one, other], [1.0, 0.0])
    assert metrics["rollout/steps"] == 2 and metrics["rollout/step_reward"] == pytest.approx(0.4)
    assert "rollout/steps" not in sample_metrics([sample_of(tokenizer, "a")], [1.0])


def test_two_labels_are_the_probability_of_the_second():
    reply = b'[{"embedding": [1.0, 3.0]}, {"embedding": [900.0, -900.0]}, {"embedding": [-900.0, 900.0]}]'
    assert step_rewards_of(reply, "u", 3, 2) == pytest.approx([1 / (1 + math.exp(-2)), 0.0, 1.0], abs=1e-15)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"no", "without an output for each step"),
        (b'{"embedding": [1.0]}', "without an output for each step"),
        (b'[{"embedding": [1.0]}]', r"returned 1 outputs of \[1\] numbers for 2 steps, and --rm-model has 1 labels"),
        (b'[{"embedding": [1.0, 2.0]}, {"embedding": [1.0, 2.0]}]', r"returned 2 outputs of \[2\] numbers"),
        (b'[{"embedding": [null]}, {"embedding": [1.0]}]', "TypeError"),  # SGLang writes NaN as null
    ],
)
def test_unusable_answer_is_an_error(reply: bytes, message: str):
    with pytest.raises(RewardModelError, match=message):
        step_rewards_of(reply, "http://judge", 2, 1)
