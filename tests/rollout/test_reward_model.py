"""Input of a reward model and handling of its responses: against a server in the same event loop."""

import asyncio
import dataclasses
import json

import pytest
from aiohttp import web

from slimrl.data.sample import Sample, SampleStatus
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.dataset.prompt_dataset import MESSAGES_KEY, PromptFormat, PromptTokenizer
from slimrl.rollout.preference_rollout import generate_rollout
from slimrl.rollout.rm_hub import RewardConfig, RewardScorer
from slimrl.rollout.rm_hub.remote import RemoteGone, RemoteRefused, RemoteReward, RemoteUnreachable
from slimrl.rollout.rm_hub.reward_model import (
    RewardInput,
    RewardModel,
    RewardModelError,
    addresses,
    choose_format,
    prompt_messages,
    reward_of,
)

SAMPLE = Sample(prompt="1+1=", index=3, response="2", tokens=[5, 6, 7], response_length=1)


class FakeRewardServer:
    """Answers /classify with the number of ids; records requests and their maximum concurrency."""

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


def rewards_of(tokenizer, samples, servers, form="conversation", vocabulary=None, concurrency=4):
    """The rewards of the samples."""

    async def main():
        for server in servers:
            await server.__aenter__()
        urls = [server.url for server in servers]
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
            for server in servers:
                await server.__aexit__()

    return asyncio.run(main())


def test_conversation_is_rendered_by_the_reward_model_template(tokenizer):
    server = FakeRewardServer()
    assert rewards_of(tokenizer, [SAMPLE], [server]) == [float(len(server.asked[0]))]
    text = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert tokenizer.decode(server.asked[0]) == text


def test_end_of_turn_tokens_of_the_policy_are_not_repeated(tokenizer):
    ended, within = (dataclasses.replace(SAMPLE, response=text) for text in ("2<|im_end|><|im_end|>", "<|im_end|>2"))
    server, plain = FakeRewardServer(), FakeRewardServer()
    rewards_of(tokenizer, [SAMPLE], [plain])
    rewards_of(tokenizer, [ended], [server])
    assert server.asked == plain.asked
    assert RewardInput(tokenizer, "text", tokenizer.all_special_tokens).response(within) == "<|im_end|>2"
    assert RewardInput(tokenizer, "text", []).response(ended) == "2<|im_end|><|im_end|>"


def test_text_is_prompt_plus_response_and_tokens_are_those_of_the_policy(tokenizer):
    text, tokens = FakeRewardServer(), FakeRewardServer()
    rewards_of(tokenizer, [SAMPLE], [text], "text")
    rewards_of(tokenizer, [SAMPLE], [tokens], "tokens")
    assert tokenizer.decode(text.asked[0]) == "1+1=2<|im_end|>" and tokens.asked == [[5, 6, 7]]


@pytest.fixture
def tokenizer_with_bos():
    """One that begins every text with <s>, ends none, and has a token for "=2"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*symbols, "=2", "<s>", "</s>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("=", "2")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = [("<s>", vocabulary["<s>"])]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("form", ["text", "template"])
@pytest.mark.parametrize("limit", [None, 3])
def test_text_is_read_as_the_tokens_of_training(form, limit, make_args, write_rows, tokenizer_with_bos):
    own = tokenizer_with_bos
    prompt = "Q: 1+1=\nA:=" if form == "template" else "1+1="
    args = make_args(
        prompt_data=write_rows([{"prompt": prompt, "chosen": "2=2", "rejected": "2=2=2"}]),
        input_key="prompt",
        label_key=None,
        rm_type=None,
        rollout_function_path="slimrl.rollout.preference_rollout.generate_rollout",
        loss_type="reward_model_loss",
        rollout_batch_size=1,
        n_samples_per_prompt=2,
        rollout_max_context_len=None if limit is None else len(prompt) + limit,
    )
    (group,) = generate_rollout(args, 0, RolloutDataSource(args, own), tokenizer=own).groups
    read = RewardInput(own, form, ["<|im_end|>"], "Q: {prompt}\nA:={response}" if form == "template" else None)
    for trained, answer in zip(group, ("2=2", "2=2=2"), strict=True):
        complete = limit is None or answer == "2=2"
        served = Sample(
            prompt=trained.prompt,
            response=f"{answer}<|im_end|>" if complete else trained.response,  # the policy's end token is no text
            status=SampleStatus.COMPLETED if complete else SampleStatus.TRUNCATED,
            metadata={MESSAGES_KEY: [{"role": "user", "content": "1+1="}]},
        )
        assert trained.status is served.status
        assert read.token_ids(served) == list(trained.tokens)
        assert (trained.tokens[-1] == own.eos_token_id) is complete and own.bos_token_id not in trained.tokens


def test_reward_model_reads_the_messages_of_a_rendered_prompt(tokenizer):
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
    (prompt,) = PromptTokenizer(form, tokenizer).make([{"prompt": messages}], ["rows.jsonl:1"])
    sample = prompt.sample(group_index=0, index=0)
    assert sample.prompt.endswith("<|im_start|>assistant\n")
    assert prompt_messages(sample) == messages
    assert prompt_messages(SAMPLE) == [{"role": "user", "content": "1+1="}]


def test_template_puts_prompt_and_response_where_it_says(tokenizer):
    asked = RewardInput(tokenizer, "template", ["<|im_end|>"], "1{response}+{prompt}=")
    sample = Sample(prompt="Q: 4:", response="2{prompt}<|im_end|>", tokens=[5, 6], response_length=1)
    sample.metadata[MESSAGES_KEY] = [{"role": "user", "content": "3{response}"}]  # without --input-template
    assert tokenizer.decode(asked.token_ids(sample)) == "12{prompt}+3{response}=<|im_end|>"
    sample.metadata[MESSAGES_KEY] *= 2
    with pytest.raises(ValueError, match="has 2 messages, and --rm-input-template takes one text"):
        asked.token_ids(sample)


def test_template_may_have_special_tokens(tokenizer_with_bos):
    asked = RewardInput(tokenizer_with_bos, "template", ["<|im_end|>"], "<s>{prompt}{response}</s>")
    ids = asked.token_ids(Sample(prompt="1=", response="2<|im_end|>", status=SampleStatus.COMPLETED))
    assert [tokenizer_with_bos.decode([one]) for one in ids] == ["<s>", "1", "=", "2", "</s>"]  # one end token


def test_requests_are_balanced_over_servers_within_their_limit(tokenizer):
    servers = [FakeRewardServer(0.02), FakeRewardServer(0.02)]
    rewards_of(tokenizer, [SAMPLE] * 20, servers, concurrency=3)
    assert len(servers[0].asked) + len(servers[1].asked) == 20 and all(len(server.asked) >= 3 for server in servers)
    assert all(1 < server.at_once <= 3 for server in servers)


@pytest.fixture
def unreachable(monkeypatch):
    """Addresses of unreachable servers, and their request counts; pauses are skipped."""
    urls, prompt_messages, ask = set(), [], RemoteReward.ask

    async def ask_or_fail(service, body):
        (gone,) = [url for url in urls if f"{url}/" in service._url] or [None]
        if gone is None:
            return await ask(service, body)
        prompt_messages.append(gone)
        raise RemoteUnreachable(f"{gone} returned no reward")

    monkeypatch.setattr(RemoteReward, "ask", ask_or_fail)
    return urls, prompt_messages


def test_requests_of_a_lost_server_are_scored_by_another(tokenizer, unreachable):
    urls, prompt_messages = unreachable
    server = FakeRewardServer(0.01)

    async def main():
        async with server:
            urls.add("http://127.0.0.1:9")
            both = ["http://127.0.0.1:9", server.url]
            model = RewardModel(both, RewardInput(tokenizer, "tokens", []), concurrency=3, vocabulary=None)
            try:
                return await asyncio.gather(*(model.reward(SAMPLE) for _ in range(20)))
            finally:
                model.close()

    assert asyncio.run(main()) == [3.0] * 20
    assert len(server.asked) == 20 and 1 < server.at_once <= 3  # it does not receive the other's requests all together
    assert 1 <= len(prompt_messages) <= 3  # it does not attract requests, although it has the fewest


def test_last_server_is_named_when_none_is_reachable(tokenizer, unreachable):
    urls, prompt_messages = unreachable
    urls |= {"http://127.0.0.1:9", "http://127.0.0.1:10"}
    model = RewardModel(sorted(urls), RewardInput(tokenizer, "tokens", []), concurrency=3, vocabulary=None)
    try:
        for _ in range(2):  # servers that are avoided are also asked again
            with pytest.raises(RemoteUnreachable, match="returned no reward"):
                asyncio.run(model.reward(SAMPLE))
    finally:
        model.close()
    assert sorted(prompt_messages) == ["http://127.0.0.1:10"] * 2 + ["http://127.0.0.1:9"] * 2


@pytest.mark.parametrize(("patience_s", "failure"), [(0.0, RemoteGone), (60.0, RemoteGone), (60.0, RemoteUnreachable)])
def test_requests_wait_for_the_replacement_of_the_only_server(tokenizer, monkeypatch, patience_s, failure):
    """Where lost servers are replaced; elsewhere, or if it answers with errors, the first round is the last."""
    server, failures, ask = FakeRewardServer(), [], RemoteReward.ask

    async def fails_thrice(service, body):
        if len(failures) == 3:
            return await ask(service, body)
        failures.append(body)
        raise failure("gone")

    monkeypatch.setattr(RemoteReward, "ask", fails_thrice)

    async def main():
        async with server:
            form = RewardInput(tokenizer, "tokens", [])
            model = RewardModel([server.url], form, concurrency=3, vocabulary=None, patience_s=patience_s)
            try:
                return await model.reward(SAMPLE)
            finally:
                model.close()

    if patience_s and failure is RemoteGone:
        assert asyncio.run(main()) == 3.0 and len(failures) == 3
    else:
        with pytest.raises(RemoteUnreachable, match="gone"):
            asyncio.run(main())
        assert len(failures) == 1


def test_token_ids_that_would_crash_the_server_are_not_sent(tokenizer):
    server = FakeRewardServer()
    with pytest.raises(RewardModelError, match="sample 3: token 7 is outside the reward model's vocabulary of 7"):
        rewards_of(tokenizer, [SAMPLE], [server], "tokens", vocabulary=7)
    assert server.asked == []


def test_rejected_request_is_sent_once_and_names_the_server(tokenizer):
    server = FakeRewardServer(status=400)
    with pytest.raises(RemoteRefused, match=r"the reward model's server http://127.0.0.1:\d+ returned HTTP 400"):
        rewards_of(tokenizer, [SAMPLE], [server])
    assert len(server.asked) == 1


def test_empty_sample_and_prompt_of_messages_as_text_are_errors(tokenizer):
    with pytest.raises(RewardModelError, match="sample 4: its prompt and response are empty"):
        rewards_of(tokenizer, [Sample(prompt="", index=4)], [FakeRewardServer()], "text")
    with pytest.raises(RewardModelError, match="use --rm-input conversation"):
        rewards_of(
            tokenizer, [Sample(prompt=[{"role": "user", "content": "x"}], index=4)], [FakeRewardServer()], "text"
        )


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"embedding": [1.0, 2.0]}, "returned 2 numbers for one response: serve a model with one label"),
        ({"embedding": [None]}, "returned None, which is not a finite number"),
        ({"text": "hello"}, "started with --is-embedding"),
        ("no json", "not JSON"),
    ],
)
def test_response_without_a_reward_is_an_error(reply, message):
    body = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
    with pytest.raises(RewardModelError, match=message):
        reward_of(body, "http://a:1")


def test_input_format_follows_the_tokenizer(tokenizer):
    import copy

    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    other = copy.deepcopy(plain)
    other.add_tokens(["<new>"])
    assert choose_format(tokenizer, other, None, "judge") == "conversation"
    assert choose_format(plain, tokenizer, None, "judge") == "tokens"
    assert choose_format(other, tokenizer, None, "judge") == "text"
    assert choose_format(tokenizer, tokenizer, "tokens", "judge") == "tokens"
    with pytest.raises(ValueError, match="--rm-input tokens: the tokenizer of --rm-model judge has another vocabulary"):
        choose_format(other, tokenizer, "tokens", "judge")
    with pytest.raises(ValueError, match="--rm-model judge has no chat template"):
        choose_format(plain, tokenizer, "conversation", "judge")


def test_addresses_are_comma_separated():
    assert addresses("http://a:1/, http://b:2") == ["http://a:1", "http://b:2"]


def test_reward_type_without_a_server_is_one_error_and_has_no_boxed_form(make_args):
    scorer = RewardScorer.from_args(make_args())
    try:
        for rm_type, message in (
            ("reward_model", "needs a server: give --rm-model"),
            ("boxed_reward_model", "the reward type 'boxed_reward_model' is unknown"),
        ):
            with pytest.raises(ValueError, match=message):
                asyncio.run(scorer.score(SAMPLE, RewardConfig(None, rm_type)))
    finally:
        scorer.close()
