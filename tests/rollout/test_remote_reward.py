"""Rewards over HTTP, against a real server in the same event loop."""

import asyncio
import json

import pytest
from aiohttp import web

from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub import RewardConfig, RewardScorer
from slimrl.rollout.rm_hub.remote import (
    ATTEMPTS,
    MAX_REPLY_BYTES,
    RemoteRefused,
    RemoteReward,
    RemoteRewardError,
    RemoteUnreachable,
    ServerPool,
)

SAMPLE = Sample(prompt="1+1=", index=3, response="so \\boxed{2}", label="2")
REMOTE = RewardConfig(None, "remote_rm")


class Service:
    """Answers requests with `replies` in turn, repeating the last one; counts the requests."""

    def __init__(self, *replies):
        self._replies = list(replies)
        self.asked = []
        self.location: str | None = None

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/rm", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/rm"
        return self

    async def __aexit__(self, *exception):
        await self._runner.cleanup()

    async def _answer(self, request):
        self.asked.append(await request.json())
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        if isinstance(reply, float):
            await asyncio.sleep(reply)
            reply = (200, "1")
        status, text = reply
        return web.Response(status=status, text=text, headers={"Location": self.location} if self.location else {})


def ask(*replies, requests=1, **limits):
    """The rewards (or the error) of `count` requests, and the requests to the service."""

    async def main():
        async with Service(*replies) as service:
            remote = RemoteReward(service.url, first_pause_s=0.01, **limits)
            try:
                return [await remote.reward(SAMPLE) for _ in range(requests)], service.asked
            except RemoteRewardError as error:
                return error, service.asked
            finally:
                remote.close()
                await asyncio.sleep(0)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "reward"),
    [("0.25", 0.25), ("1", 1.0), ("-3", -3.0), ('{"score": 2, "why": "x"}', {"score": 2, "why": "x"})],
)
def test_reply_is_the_reward(text, reward):
    (got,), asked = ask((200, text))
    assert got == reward
    assert asked == [{"prompt": "1+1=", "response": "so \\boxed{2}", "label": "2"}]


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_rejected_request_is_sent_once(status):
    error, asked = ask((status, "bad label"))
    assert isinstance(error, RemoteRefused) and f"returned HTTP {status}: bad label; fix the request" in str(error)
    assert len(asked) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_is_rejected_and_the_prompt_is_sent_nowhere_else(status):
    async def main():
        async with Service((200, "1")) as elsewhere, Service((status, "")) as service:
            service.location = elsewhere.url
            remote = RemoteReward(service.url, first_pause_s=0.01)
            with pytest.raises(RemoteRefused) as caught:
                await remote.reward(SAMPLE)
            remote.close()
            return str(caught.value), service, elsewhere

    text, service, elsewhere = asyncio.run(main())
    assert text.startswith(f"--rm-url {service.url} redirects (HTTP {status}) to '{elsewhere.url}', but prompts and")
    assert text.endswith("set --rm-url to the final address")
    assert (len(service.asked), elsewhere.asked) == (1, [])


def test_recovered_service_is_asked_again():
    (got,), asked = ask((503, "loading"), (429, "later"), (200, "0.5"))
    assert got == 0.5 and len(asked) == 3


def test_persistently_failing_service_is_an_error_with_its_last_response():
    error, asked = ask((500, "out of memory"))
    assert isinstance(error, RemoteUnreachable) and len(asked) == ATTEMPTS
    assert f"returned no reward in {ATTEMPTS} attempts, last error: HTTP 500: out of memory" in str(error)


def test_hung_service_costs_its_time_limit_each_time():
    error, asked = ask(30.0, time_limit_s=0.1)
    assert isinstance(error, RemoteUnreachable) and "no response within 0.1 s" in str(error) and len(asked) == ATTEMPTS


def test_request_in_flight_is_sent_again_to_the_address_of_the_replacement():
    """The lost machine does not answer: nothing but the time limit would end the request."""

    async def main():
        async with Service(60.0) as silent, Service((200, "0.5")) as replacement:
            lost, new = (service.url.removesuffix("/rm") for service in (silent, replacement))
            pool = ServerPool([lost], "/rm", owner="the reward model", concurrency=4, key=None)
            try:
                asked = [asyncio.ensure_future(pool.ask(b"{}", lambda body, url: (body, url))) for _ in range(2)]
                while len(silent.asked) < 2:
                    await asyncio.sleep(0.01)
                pool.move("http://127.0.0.1:9", "http://127.0.0.1:10")  # of another pool
                assert not any(one.done() for one in asked)
                pool.move(lost, new)
                assert await asyncio.wait_for(asyncio.gather(*asked), 20) == [(b"0.5", new)] * 2
                assert await pool.ask(b"{}", lambda body, url: url) == new  # a request after the move
            finally:
                pool.close()
                await asyncio.sleep(0)

    asyncio.run(main())


def test_unreachable_service_is_an_error():
    async def main():
        remote = RemoteReward("http://127.0.0.1:9/rm", first_pause_s=0.01)
        try:
            with pytest.raises(RemoteUnreachable, match=r"http://127.0.0.1:9/rm returned no reward in 5 attempts"):
                await remote.reward(SAMPLE)
        finally:
            remote.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("good", "which is not JSON"),
        ('"good"', "must be a number or an object"),
        ("true", "must be a number"),
        ("[1]", "must"),
    ],
)
def test_invalid_reply_is_an_error(text, message):
    error, asked = ask((200, text))
    assert message in str(error) and len(asked) == 1


def test_reply_without_an_end_is_cut_off():
    error, _ = ask((200, "1" * (MAX_REPLY_BYTES + 1)))
    assert f"returned more than {MAX_REPLY_BYTES} bytes" in str(error)


def score(make_args, rm_type, **service):
    async def main():
        async with Service((200, "0.5")) as there:
            scorer = RewardScorer.from_args(make_args(rm_url=there.url, **service))
            try:
                return await scorer.score(SAMPLE, RewardConfig(None, rm_type)), there.asked
            finally:
                scorer.close()
                await asyncio.sleep(0)

    return asyncio.run(main())


def test_scorer_asks_the_service_and_sends_the_boxed_answer_with_the_prefix(make_args):
    reward, asked = score(make_args, "remote_rm")
    assert reward == 0.5 and asked[0]["response"] == "so \\boxed{2}"
    reward, asked = score(make_args, "boxed_remote_rm")
    assert reward == 0.5 and asked[0]["response"] == "2"


def test_service_without_an_address_is_one_error(make_args):
    scorer = RewardScorer.from_args(make_args())
    with pytest.raises(ValueError, match="remote_rm needs a service: give its address in --rm-url"):
        asyncio.run(scorer.score(SAMPLE, REMOTE))
    scorer.close()


def test_many_samples_are_scored_concurrently(make_args):
    async def main():
        async with Service(0.05) as service:
            scorer = RewardScorer.from_args(make_args(rm_url=service.url))
            try:
                return await asyncio.gather(*(scorer.score(SAMPLE, REMOTE) for _ in range(100))), json.dumps(
                    service.asked
                )
            finally:
                scorer.close()
                await asyncio.sleep(0)

    rewards, asked = asyncio.run(main())
    assert rewards == [1.0] * 100 and asked.count("1+1=") == 100
