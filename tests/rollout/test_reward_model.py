"""What a reward model is given to read, and what becomes of its answers: against a server in the same event loop."""

import asyncio
import dataclasses
import json

import pytest
from aiohttp import web

from slimrl.data.sample import Sample
from slimrl.rollout.dataset.prompt_dataset import PromptFormat, PromptTokenizer
from slimrl.rollout.rm_hub import RewardConfig, RewardScorer
from slimrl.rollout.rm_hub.remote import RemoteRefused, RemoteReward, RemoteUnreachable
from slimrl.rollout.rm_hub.reward_model import (
    RewardInput,
    RewardModel,
    RewardModelError,
    addresses,
    asked,
    choose_format,
    reward_of,
)

SAMPLE = Sample(prompt="1+1=", index=3, response="2", tokens=[5, 6, 7], response_length=1)


class Judge:
    """Answers /classify with the number of ids; notes what it was asked and how many asked at once."""

    def __init__(self, seconds=0.0, status=200):
        self.asked, self.at_once, self._now = [], 0, 0
        self._seconds, self._status = seconds, status

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/classify", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exception):
        await self._runner.cleanup()

    async def _answer(self, request):
        ids = (await request.json())["input_ids"]
        self.asked.append(ids)
        self._now += 1
        self.at_once = max(self.at_once, self._now)
        await asyncio.sleep(self._seconds)
        self._now -= 1
        return web.json_response({"embedding": [float(len(ids))], "meta_info": {}}, status=self._status)


def judged(tokenizer, samples, judges, form="conversation", vocabulary=None, concurrency=4):
    """The rewards of the samples."""

    async def main():
        for judge in judges:
            await judge.__aenter__()
        urls = [judge.url for judge in judges]
        model = RewardModel(
            urls,
            RewardInput(tokenizer, form, tokenizer.all_special_tokens),
            concurrency=concurrency,
            vocabulary=vocabulary,
        )
        try:
            return await asyncio.gather(*(model.reward(one) for one in samples))
        finally:
            model.close()
            for judge in judges:
                await judge.__aexit__()

    return asyncio.run(main())


def test_a_conversation_is_rendered_by_the_reward_models_template(tokenizer):
    judge = Judge()
    assert judged(tokenizer, [SAMPLE], [judge]) == [float(len(judge.asked[0]))]
    text = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert tokenizer.decode(judge.asked[0]) == text


def test_the_policys_marks_at_the_end_of_its_turn_are_not_read_twice(tokenizer):
    ended, within = (dataclasses.replace(SAMPLE, response=text) for text in ("2<|im_end|><|im_end|>", "<|im_end|>2"))
    judge, plain = Judge(), Judge()
    judged(tokenizer, [SAMPLE], [plain])
    judged(tokenizer, [ended], [judge])
    assert judge.asked == plain.asked
    assert RewardInput(tokenizer, "text", tokenizer.all_special_tokens).response(within) == "<|im_end|>2"
    assert RewardInput(tokenizer, "text", []).response(ended) == "2<|im_end|><|im_end|>"


def test_text_is_prompt_and_response_and_tokens_are_the_policys(tokenizer):
    text, tokens = Judge(), Judge()
    judged(tokenizer, [SAMPLE], [text], "text")
    judged(tokenizer, [SAMPLE], [tokens], "tokens")
    assert tokenizer.decode(text.asked[0]) == "1+1=2" and tokens.asked == [[5, 6, 7]]


def test_the_messages_behind_a_rendered_prompt_are_what_the_model_reads(tokenizer):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="}]
    columns = {"input_key": "prompt", "label_key": None, "metadata_key": "metadata", "tool_key": "tools"}
    form = PromptFormat(
        **columns,
        apply_chat_template=True,
        chat_template_kwargs={},
        max_prompt_len=None,
        keep_messages=False,
        keep_conversation=True,
    )
    (prompt,) = PromptTokenizer(form, tokenizer).make([{"prompt": messages}])
    sample = prompt.sample(group_index=0, index=0)
    assert sample.prompt.endswith("<|im_start|>assistant\n")
    assert asked(sample) == messages
    assert asked(SAMPLE) == [{"role": "user", "content": "1+1="}]


def test_servers_share_the_requests_and_none_has_more_than_allowed(tokenizer):
    judges = [Judge(0.02), Judge(0.02)]
    judged(tokenizer, [SAMPLE] * 20, judges, concurrency=3)
    assert len(judges[0].asked) + len(judges[1].asked) == 20 and all(len(judge.asked) >= 3 for judge in judges)
    assert all(1 < judge.at_once <= 3 for judge in judges)


@pytest.fixture
def unreachable(monkeypatch):
    """The addresses of servers that cannot be reached, and how often each was asked; the pauses are left out."""
    urls, asked, ask = set(), [], RemoteReward.ask

    async def ask_or_fail(service, body):
        (gone,) = [url for url in urls if f"{url}/" in service._url] or [None]
        if gone is None:
            return await ask(service, body)
        asked.append(gone)
        raise RemoteUnreachable(f"{gone} gave no reward")

    monkeypatch.setattr(RemoteReward, "ask", ask_or_fail)
    return urls, asked


def test_what_a_lost_server_does_not_judge_another_does(tokenizer, unreachable):
    urls, asked = unreachable
    judge = Judge(0.01)

    async def main():
        async with judge:
            urls.add("http://127.0.0.1:9")
            both = ["http://127.0.0.1:9", judge.url]
            model = RewardModel(both, RewardInput(tokenizer, "tokens", []), concurrency=3, vocabulary=None)
            try:
                return await asyncio.gather(*(model.reward(SAMPLE) for _ in range(20)))
            finally:
                model.close()

    assert asyncio.run(main()) == [3.0] * 20
    assert len(judge.asked) == 20 and 1 < judge.at_once <= 3  # the survivor is not given the other's share at once
    assert 1 <= len(asked) <= 3  # no magnet for requests, though it has the fewest


def test_where_no_server_can_be_reached_the_last_one_is_named(tokenizer, unreachable):
    urls, asked = unreachable
    urls |= {"http://127.0.0.1:9", "http://127.0.0.1:10"}
    model = RewardModel(sorted(urls), RewardInput(tokenizer, "tokens", []), concurrency=3, vocabulary=None)
    try:
        for _ in range(2):  # also those that are avoided are asked again
            with pytest.raises(RemoteUnreachable, match="gave no reward"):
                asyncio.run(model.reward(SAMPLE))
    finally:
        model.close()
    assert sorted(asked) == ["http://127.0.0.1:10"] * 2 + ["http://127.0.0.1:9"] * 2


def test_ids_that_would_kill_the_server_are_not_sent(tokenizer):
    judge = Judge()
    with pytest.raises(RewardModelError, match="sample 3: token 7 is none of the 7 that the reward model has"):
        judged(tokenizer, [SAMPLE], [judge], "tokens", vocabulary=7)
    assert judge.asked == []


def test_a_refused_request_is_sent_once_and_names_the_server(tokenizer):
    judge = Judge(status=400)
    with pytest.raises(RemoteRefused, match=r"the reward model's server http://127.0.0.1:\d+ answered HTTP 400"):
        judged(tokenizer, [SAMPLE], [judge])
    assert len(judge.asked) == 1


def test_an_empty_sample_and_a_prompt_of_messages_as_text_are_errors(tokenizer):
    with pytest.raises(RewardModelError, match="sample 4: its prompt and response are empty"):
        judged(tokenizer, [Sample(prompt="", index=4)], [Judge()], "text")
    with pytest.raises(RewardModelError, match="give --rm-input conversation"):
        judged(tokenizer, [Sample(prompt=[{"role": "user", "content": "x"}], index=4)], [Judge()], "text")


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"embedding": [1.0, 2.0]}, "answered 2 numbers for one response: serve a model with one label"),
        ({"embedding": [None]}, "answered None, which is no finite number"),
        ({"text": "hello"}, "started with --is-embedding"),
        ("no json", "not JSON"),
    ],
)
def test_what_is_no_reward_is_an_error(reply, message):
    body = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
    with pytest.raises(RewardModelError, match=message):
        reward_of(body, "http://a:1")


def test_the_form_follows_the_tokenizer(tokenizer):
    import copy

    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    other = copy.deepcopy(plain)
    other.add_tokens(["<new>"])
    assert choose_format(tokenizer, other, None, "judge") == "conversation"
    assert choose_format(plain, tokenizer, None, "judge") == "tokens"
    assert choose_format(other, tokenizer, None, "judge") == "text"
    assert choose_format(tokenizer, tokenizer, "tokens", "judge") == "tokens"
    with pytest.raises(ValueError, match="--rm-input tokens: the tokenizer of --rm-model judge is not the policy's"):
        choose_format(other, tokenizer, "tokens", "judge")
    with pytest.raises(ValueError, match="--rm-model judge has no chat template"):
        choose_format(plain, tokenizer, "conversation", "judge")


def test_addresses_are_joined_by_commas():
    assert addresses("http://a:1/, http://b:2") == ["http://a:1", "http://b:2"]


def test_without_a_server_the_type_is_a_sentence_and_it_has_no_boxed_form(make_args):
    scorer = RewardScorer(make_args())
    try:
        for rm_type, message in (
            ("reward_model", "asks a server, and there is none: give --rm-model"),
            ("boxed_reward_model", "the reward type 'boxed_reward_model' is not known"),
        ):
            with pytest.raises(ValueError, match=message):
                asyncio.run(scorer.score(SAMPLE, RewardConfig(None, rm_type)))
    finally:
        scorer.close()
