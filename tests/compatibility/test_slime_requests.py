"""Requests of modules written for slime to the router and other services, and their results in a rollout."""

from __future__ import annotations

import asyncio
import textwrap

import pytest
import torch

from slimrl.arguments import Arguments
from slimrl.compatibility import rollout_helpers
from slimrl.compatibility.rollout_helpers import GenerateState, get_model_url, load_function
from slimrl.data.sample import Sample, SampleStatus
from slimrl.engines.protocol import EngineRequestError, StoppableEngine
from slimrl.engines.sglang.client import RouterClient
from slimrl.rollout.generation.sample_tracker import RouterAccess
from tests.compatibility.slime_router import Router, answer, rolled, serve


def test_post_and_get_return_json_or_text_and_retry_transient_errors(monkeypatch):
    monkeypatch.setattr(rollout_helpers, "PAUSE_S", 0.0)
    router = Router(
        {
            "/good": [(503, "later"), (429, "later"), (200, {"score": 1})],
            "/text": [(200, "yes")],
            "/bad": [(500, "broken")],
            "/refused": [(422, "no")],
            "/moved": [(302, "there")],
        }
    )

    async def body(port):
        at = f"http://127.0.0.1:{port}"
        assert await rollout_helpers.post(f"{at}/good", {"a": torch.tensor([1])}, headers={"X-Own": "1"}) == {
            "score": 1
        }
        assert await rollout_helpers.get(f"{at}/text") == "yes"
        for path, message in (("bad", r"failed with HTTP 500: broken \(tried 2 times"), ("refused", "HTTP 422: no")):
            with pytest.raises(rollout_helpers.RequestFailedError, match=message):
                await rollout_helpers.post(f"{at}/{path}", {}, max_retries=2)
        with pytest.raises(rollout_helpers.RequestFailedError, match="returned HTTP 302"):
            await rollout_helpers.post(f"{at}/moved", {})
        with pytest.raises(rollout_helpers.RequestFailedError, match="cannot be reached"):
            await rollout_helpers.get("http://127.0.0.1:9")
        with pytest.raises(ValueError, match="max_retries 0"):
            await rollout_helpers.post(at, {}, max_retries=0)

    serve(router, body)
    paths = [path for path, _, _ in router.asked]
    assert {path: paths.count(path) for path in paths} == {
        "/good": 3,
        "/text": 1,
        "/bad": 2,
        "/refused": 1,
        "/moved": 1,
    }
    assert router.asked[0][1] == {"a": [1]} and router.asked[0][2]["X-Own"] == "1"


@pytest.mark.parametrize(
    ("replaced", "status", "retries", "answered"),
    [(True, 503, 60, True), (True, 503, 5, False), (True, 500, 60, False), (False, 503, 60, False)],
)
def test_post_waits_for_the_lost_server_of_a_frozen_model_if_it_is_replaced(
    monkeypatch, replaced, status, retries, answered
):
    monkeypatch.setattr(rollout_helpers, "PAUSE_S", 0.0)
    router = Router({"/generate": [*[(status, "no server")] * 70, (200, {"text": "yes"})]})

    async def body(port):
        url = f"http://127.0.0.1:{port}/generate"
        args = Arguments(sglang_router_ip="h", sglang_router_port=1, use_fault_tolerance=replaced)
        args.sglang_model_routers = {"judge": ("127.0.0.1", port)}
        RouterAccess.from_args(args).begin_calls()
        if answered:
            assert await rollout_helpers.post(url, {}, retries) == {"text": "yes"}
        else:
            with pytest.raises(rollout_helpers.RequestFailedError, match=rf"tried {retries} times"):
                await rollout_helpers.post(url, {}, retries)

    serve(router, body)
    assert len(router.asked) == (71 if answered else retries)


def test_text_agent_is_trained_on_its_own_tokens(tokenizer, make_args, monkeypatch):
    replies = [(200, answer(tokenizer, "is it 3")), (200, answer(tokenizer, "no", "length"))]
    sample, asked = rolled(tokenizer, make_args, monkeypatch, {"/generate": replies}, "search_agent.generate")
    assert sample.response == "is it 3(3)no" and sample.status is SampleStatus.TRUNCATED
    assert tokenizer.decode(sample.tokens) == sample.prompt + sample.response
    assert sample.loss_mask == [1] * 7 + [0] * 3 + [1] * 2
    assert sample.rollout_log_probs == [-0.5] * 7 + [0.0] * 3 + [-0.5] * 2
    assert [body["text"] for _, body, _ in asked] == [sample.prompt, sample.prompt + "is it 3(3)"]
    assert {headers["X-SMG-Routing-Key"] for _, _, headers in asked} == {sample.session_id}  # one server for all turns
    assert sample.weight_versions == ["2", "2"] and sample.version_spans == [["2", 12]]


def test_agent_with_sample_accounting_is_scored_by_its_own_function(tokenizer, make_args, monkeypatch):
    replies = [(200, answer(tokenizer, "0", version="2")), (200, answer(tokenizer, "ok", version="3"))]
    sample, asked = rolled(
        tokenizer,
        make_args,
        monkeypatch,
        {"/generate": replies},
        "tool_agent.generate",
        custom_rm_path="tool_agent.reward_func",
        rollout_max_context_len=64,
    )
    assert sample.response == "0(0)ok" and sample.loss_mask == [1, 0, 0, 0, 1, 1]
    assert sample.version_spans == [["2", 1], ["", 3], ["3", 2]] and sample.status is SampleStatus.COMPLETED
    assert sample.reward == pytest.approx(1.1)  # 0 + 0 is 0, after one call
    assert asked[1][1]["input_ids"] == sample.tokens[:-2]
    room = 64 - len(sample.tokens) + 2
    assert asked[1][1]["sampling_params"]["max_new_tokens"] == min(64, room)


def test_weight_version_is_unknown_when_turns_are_joined_by_hand(tokenizer, make_args, monkeypatch):
    replies = [(200, answer(tokenizer, "is it 3", version="2")), (200, answer(tokenizer, "no", version="3"))]
    sample, _ = rolled(tokenizer, make_args, monkeypatch, {"/generate": replies}, "search_agent.generate")
    assert sample.weight_versions == ["2", "3"] and sample.version_spans == [["", 12]] * bool(sample.version_spans)


OWN = """
    import asyncio
    from slime.rollout.sglang_rollout import GenerateState, generate as plain, get_model_url
    from slime.rollout.rm_hub import batched_async_rm
    from slime.utils.http_utils import post
    from slime.utils.types import Sample

    async def longer(args, sample, sampling_params):
        sample = await plain(args, sample, {**sampling_params, "temperature": 0.0})
        sample.response += "!"
        return sample

    async def asks(args, sample, **kwargs):
        own = get_model_url(args, "default", "/score")
        await post(own, {})
        return await post(own.replace("127.0.0.1", "localhost"), {})

    async def judged(args, sample, sampling_params):
        sample = await plain(args, sample, sampling_params)
        sample.reward = (await batched_async_rm(args, [sample]))[0]
        return sample

    async def chats(args, sample, sampling_params):
        answer = await post(get_model_url(args, "default", "/v1/chat/completions"), {"messages": []})
        sample.metadata["chat"] = answer["choices"][0]["message"]["content"]
        return await plain(args, sample, sampling_params)

    async def streams(args, sample, sampling_params):
        await post(get_model_url(args, "default"), {"text": "x", "stream": True})

    async def with_train_metadata(args, sample, sampling_params):
        sample = await plain(args, sample, sampling_params)
        sample.train_metadata = {"level": 1}
        return sample

    async def in_words(args, sample, sampling_params):
        sample = await plain(args, sample, sampling_params)
        return Sample(prompt=sample.prompt, tokens=sample.tokens, response_length=sample.response_length,
                      rollout_log_probs=sample.rollout_log_probs, status="completed",
                      index=sample.index, group_index=sample.group_index)

    async def refused(args, sample, sampling_params):
        await post(get_model_url(args, "default", "/refused"), {})

    async def with_state(args, sample, sampling_params):
        state = GenerateState(args)
        with state.dp_rank_context() as rank:
            async with state.semaphore:
                sample = await plain(args, sample, {**sampling_params, **state.sampling_params})
        sample.metadata["state"] = [rank, state.aborted, state.processor, state.sampling_params["max_new_tokens"]]
        return sample
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_functions.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(tmp_path)


def test_run_key_is_sent_only_to_the_run_router(own, tokenizer, make_args, monkeypatch):
    answers = {"/generate": [(200, answer(tokenizer, "ab"))], "/score": [(200, 0.5)]}
    changes = {"custom_rm_path": "own_functions.asks", "sglang_options": {"api_key": "secret"}}
    sample, asked = rolled(tokenizer, make_args, monkeypatch, answers, "own_functions.longer", **changes)
    shown = [headers.get("Authorization") for path, _, headers in asked if path == "/score"]
    assert sample.reward == 0.5 and shown == ["Bearer secret", None]


def test_slime_names_work_in_a_generate_function(own, tokenizer, make_args, monkeypatch):
    chat = {"choices": [{"message": {"content": "hello"}}]}
    answers = {"/generate": [(200, answer(tokenizer, "\\boxed{0}"))], "/v1/chat/completions": [(200, chat)]}

    def sample_of(name, **changes):
        return rolled(tokenizer, make_args, monkeypatch, answers, f"own_functions.{name}", **changes)

    sample, asked = sample_of("longer")
    assert sample.response == "\\boxed{0}!" and asked[0][1]["sampling_params"]["temperature"] == 0.0
    assert sample_of("judged", custom_rm_path=None)[0].reward == 1.0
    assert sample_of("chats")[0].metadata["chat"] == "hello"
    sample = sample_of("in_words")[0]
    assert sample.status is SampleStatus.COMPLETED and sample.reward is not None
    assert sample_of("with_state")[0].metadata["state"] == [0, False, None, 64]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("streams", "streaming is not supported: remove stream from the payload"),
        ("with_train_metadata", "the sample sets train_metadata, which slimrl does not use: put it into metadata"),
        ("refused", "rejected the request with HTTP 422"),
    ],
)
def test_unsupported_name_is_reported(own, tokenizer, make_args, monkeypatch, name, message):
    answers = {"/generate": [(200, answer(tokenizer, "ab"))], "/refused": [(422, "no")]}
    with pytest.raises(RuntimeError, match=message):
        rolled(tokenizer, make_args, monkeypatch, answers, f"own_functions.{name}")


def test_helpers_report_where_they_cannot_be_called():
    args = Arguments(sglang_router_ip="h", sglang_router_port=1)
    with pytest.raises(RuntimeError, match="only within a function of --custom-generate-function-path"):
        asyncio.run(load_function("slimrl.compatibility.rollout_helpers.generate")(args, Sample(), {}))
    with pytest.raises(ValueError, match="there is no model 'ref'"):
        get_model_url(args, "ref")
    args.sglang_model_routers = {"ref": ("r", 2), "policy": ("h", 1)}  # of --sglang-config
    assert get_model_url(args, "ref", "/score") == "http://r:2/score"
    assert get_model_url(args, "policy") == get_model_url(args, "actor") == "http://h:1/generate"
    with pytest.raises(ValueError, match="there is no model 'judge': the run serves actor, default, policy, ref"):
        get_model_url(args, "judge")


def test_post_returns_aborted_once_the_rollout_is_full():
    class Silent:
        async def abort_all(self):
            pass

        async def ask(self, path, payload, session_id=None):
            return {"asked": path}

    async def body():
        engine = StoppableEngine(Silent())
        before = await engine.ask("/generate", {})
        await engine.stop()
        paths = ("/generate", "/v1/chat/completions", "/flush_cache")
        return before, [await engine.ask(path, {}) for path in paths]

    before, (generated, chat, other) = asyncio.run(body())
    assert before == {"asked": "/generate"} and other == {"asked": "/flush_cache"}
    assert (
        generated["meta_info"]["finish_reason"]["type"] == "abort"
        and generated["meta_info"]["output_token_logprobs"] == []
    )
    assert chat["choices"][0]["finish_reason"] == "abort" and chat["choices"][0]["message"]["content"] == ""


def test_client_returns_responses_unchanged_and_still_validates_them(tokenizer):
    good = {**answer(tokenizer, "ab"), "extra": [1]}
    torn = {**answer(tokenizer, "ab"), "output_ids": [1]}
    router = Router({"/generate": [(200, good), (200, torn)], "/refused": [(400, "no")]})

    async def body(port):
        client = RouterClient(f"http://127.0.0.1:{port}", [], concurrency=1, request_timeout_s=5)
        async with client:
            payload = {"text": "x", "return_logprob": True}
            assert await client.ask("/generate", payload, "s") == good
            with pytest.raises(Exception, match="answered 1 token ids and 2 log-probabilities of other tokens"):
                await client.ask("/generate", payload)
            with pytest.raises(EngineRequestError, match="refused"):
                await client.ask("/refused", {})
            waiting = asyncio.ensure_future(client.ask("/generate", payload))
            client._permits.get_nowait()
            await asyncio.sleep(0)
            await client.abort_all()
            client._permits.put_nowait(None)
            return await waiting

    assert serve(router, body)["meta_info"]["finish_reason"]["type"] == "abort"


def test_state_does_not_run_checkpoint_code_by_default(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "slimrl.compatibility.rollout_helpers._cached_tokenizer", lambda path, trusted: asked.append((path, trusted))
    )
    GenerateState(Arguments(hf_checkpoint="model"))
    GenerateState(Arguments(hf_checkpoint="model", sglang_options={"trust_remote_code": True}))
    assert asked == [("model", False), ("model", True)]
