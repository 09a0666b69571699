"""The teacher on servers: what it is sent, what becomes of its answers, and which samples may be trained on."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest
import torch
from aiohttp import web

from slimrl.data.batch_schedule import schedule_batch
from slimrl.data.sample import PackedColumn, Sample, SampleStatus
from slimrl.data.train_batch import RolloutBatch, batch_from_samples
from slimrl.rollout.convert_samples import Rewards, batch_from_columns, training_batch
from slimrl.rollout.rm_hub import RewardConfig, RewardScorer
from slimrl.rollout.rm_hub.grader_pool import GraderPool
from slimrl.rollout.rm_hub.remote import RemoteRefused, RemoteUnreachable
from slimrl.rollout.rm_hub.teacher import Reply, ServedTeacher, TeacherError, log_probs_of


def sample(index: int = 0, prompt: int = 3, response: int = 4) -> Sample:
    return Sample(
        prompt="p",
        index=index,
        group_index=0,
        tokens=[10 + position for position in range(prompt + response)],
        response_length=response,
        rollout_log_probs=[-1.0] * response,
        status=SampleStatus.COMPLETED,
        reward=0.0,
    )


def score(position: int, token: int) -> float:
    return -(position + token / 100)


class FakeTeacher:
    """Answers /generate as SGLang 0.5.20 does for a request without new tokens."""

    def __init__(self, status: int = 200, key: str | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self._status, self._key = status, key

    async def __aenter__(self) -> FakeTeacher:
        app = web.Application()
        app.router.add_post("/generate", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        if self._key is not None and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json()
        self.asked.append(body)
        ids, start = body["input_ids"], body["logprob_start_len"]
        entries = [[score(place, ids[place]), ids[place], None] for place in range(start, len(ids))]
        entries[0][0] = None
        found: dict[str, Any] = {"input_token_logprobs": entries}
        if top := body.get("top_logprobs_num", 0):
            found["input_top_logprobs"] = [None, *(top_at(place, top) for place in range(start + 1, len(ids)))]
        return web.json_response({"text": "", "output_ids": [], "meta_info": found}, status=self._status)


def top_at(place: int, top: int) -> list[list[Any]]:
    """The most probable tokens at a place, as SGLang returns them."""
    return [[-float(place + rank), 100 * place + rank, None] for rank in range(top)]


def filled(
    samples: list[Sample],
    *servers: FakeTeacher,
    vocabulary: int | None = None,
    key: str | None = None,
    path: str = "",
    top: int = 0,
) -> list[Sample]:
    """The samples with the teacher's log-probabilities."""

    async def main() -> None:
        for server in servers:
            await server.__aenter__()
        teacher = ServedTeacher(
            [server.url + path for server in servers], concurrency=2, vocabulary=vocabulary, key=key, top=top
        )
        try:
            await asyncio.gather(*(teacher.fill(one) for one in samples))
        finally:
            teacher.close()
            for server in servers:
                await server.__aexit__()

    asyncio.run(main())
    return samples


def test_every_response_token_gets_the_log_probability_at_its_place():
    server = FakeTeacher()
    one, long = filled([sample(), sample(1, prompt=1, response=6)], server, path="/generate")  # slime's address
    assert one.teacher_log_probs == [score(place, 10 + place) for place in range(3, 7)]
    assert long.teacher_log_probs == [score(place, 10 + place) for place in range(1, 7)]
    asked = server.asked[0]
    assert asked["sampling_params"]["max_new_tokens"] == 0 and asked["return_logprob"] is True
    assert asked["input_ids"] == one.tokens and asked["logprob_start_len"] == 2


def test_tokens_and_log_probabilities_stay_packed():
    one = sample()
    one.pack("tokens", PackedColumn(torch.arange(10, 17, dtype=torch.int32).numpy().tobytes(), "i4"))
    filled([one], FakeTeacher())
    assert isinstance(one.column("tokens"), PackedColumn) and isinstance(one.column("teacher_log_probs"), PackedColumn)


def test_empty_response_is_not_sent():
    server = FakeTeacher()
    (one,) = filled([sample(response=0)], server)
    assert one.teacher_log_probs == [] and server.asked == []


def test_key_of_the_run_is_sent_and_a_refusal_names_the_teacher():
    assert filled([sample()], FakeTeacher(key="secret"), key="secret")[0].teacher_log_probs
    with pytest.raises(RemoteRefused, match=r"the teacher's server http://\S+ returned HTTP 401"):
        filled([sample()], FakeTeacher(key="secret"), key="other")


def test_requests_go_to_all_servers_and_past_a_lost_one(monkeypatch):
    monkeypatch.setattr("slimrl.rollout.rm_hub.remote.ATTEMPTS", 1)
    first, second = FakeTeacher(), FakeTeacher()
    filled([sample(index) for index in range(4)], first, second)
    assert len(first.asked) == len(second.asked) == 2
    assert all(one.teacher_log_probs for one in filled([sample(), sample(1)], FakeTeacher(status=503), FakeTeacher()))
    with pytest.raises(RemoteUnreachable, match="the teacher's server"):
        filled([sample()], FakeTeacher(status=503))


def test_token_outside_the_vocabulary_is_an_error_that_names_the_tokenizer():
    with pytest.raises(TeacherError, match=r"sample 7: token 16 is outside the teacher's vocabulary of 16: --opd-type"):
        filled([sample(7)], FakeTeacher(), vocabulary=16)
    filled([sample(7)], FakeTeacher(), vocabulary=17)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"<html>", "returned b'<html>', without a log-probability for each of 2 input tokens"),
        (b"{}", "without a log-probability for each of 2 input tokens"),
        (b'{"meta_info": {"input_token_logprobs": [[null, 4, null], [-1.0, 5, null]]}}', "without a log-probability"),
        (b'{"meta_info": {"input_token_logprobs": [[-1.0, 5, null]]}}', "log-probabilities of 1 other tokens"),
        (b'{"meta_info": {"input_token_logprobs": [[-1.0, 5, null], [-1.0, 9, null]]}}', "other tokens than the 2"),
        (b'{"meta_info": {"input_token_logprobs": [[-1.0, 4, null], [0.5, 5, null]]}}', "returned 0.5, which is not a"),
        (b'{"meta_info": {"input_token_logprobs": [[-1.0, 4, null], [-1e31, 5, null]]}}', "is not a log-probability"),
    ],
)
def test_unusable_answer_is_an_error_that_names_the_server(reply: bytes, message: str):
    with pytest.raises(TeacherError) as error:
        log_probs_of(Reply(reply), "http://h:1", [4, 5])
    assert message in str(error.value) and "the teacher's server http://h:1" in str(error.value)


def test_servers_report_the_last_id_of_a_vocabulary_as_zero():
    reply = b'{"meta_info": {"input_token_logprobs": [[null, 1, null], [-1.5, 4, null], [-2.5, 0, null]]}}'
    assert log_probs_of(Reply(reply), "http://h:1", [4, 151935]) == [-1.5, -2.5]


# from samples to training ---------------------------------------------------------------------------------------------


def scored(*values: list[float] | None, response: int = 3) -> list[Sample]:
    samples = [sample(index, response=response) for index in range(len(values))]
    for one, own in zip(samples, values, strict=True):
        one.teacher_log_probs = own
    return samples


ONES = torch.ones(2)


def test_column_reaches_each_rank_in_the_order_of_its_samples(tmp_path):
    samples = scored([-0.1, -0.2, -0.3], [-1.1, -1.2, -1.3])
    batch = batch_from_samples(samples, ONES, ONES)
    assert batch.teacher_log_probs is not None and batch.teacher_log_probs.dtype == torch.float32
    ranks = schedule_batch(
        batch,
        data_parallel_size=2,
        global_batch_size=2,
        micro_batch_size=1,
        max_tokens_per_micro_batch=None,
        balance=False,
    )
    columns = [rank.teacher_log_probs for rank in ranks]
    assert torch.equal(torch.cat([column for column in columns if column is not None]), batch.teacher_log_probs)
    ranks[1].save(tmp_path / "batch")
    loaded = RolloutBatch.load(tmp_path / "batch").teacher_log_probs
    assert loaded is not None and loaded.tolist() == pytest.approx([-1.1, -1.2, -1.3])
    assert batch_from_samples(scored(None, None), ONES, ONES).teacher_log_probs is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (([-0.1] * 3, None), "1 of 2 samples have no teacher_log_probs, the first is sample 1"),
        (([-0.1] * 3, [-0.1] * 2), "has 2 teacher_log_probs for 3 response tokens"),
    ],
)
def test_incomplete_column_is_an_error_that_names_the_sample(values: Any, message: str):
    with pytest.raises(ValueError, match=message):
        batch_from_samples(scored(*values), ONES, ONES)


def test_training_gets_the_column_exactly_if_it_reads_it(make_args):
    args, rewards = make_args(), Rewards(ONES, ONES)
    distilled = dataclasses.replace(args, use_opd=True, opd_type="sglang")
    both, none = scored([-0.1] * 3, [-0.2] * 3), scored(None, None)
    assert training_batch(distilled, both, rewards, hook_args=distilled).teacher_log_probs is not None
    assert training_batch(args, none, rewards, hook_args=args).teacher_log_probs is None
    with pytest.raises(
        ValueError, match="no sample has teacher_log_probs, which --use-opd --opd-type sglang trains on"
    ):
        training_batch(distilled, none, rewards, hook_args=distilled)
    with pytest.raises(ValueError, match="which only --use-opd --opd-type sglang reads"):
        training_batch(args, both, rewards, hook_args=args)


def test_custom_conversion_may_return_the_column():
    columns = {
        "tokens": [[1, 2, 3]],
        "response_lengths": [2],
        "rewards": [1.0],
        "loss_masks": [[1, 1]],
        "rollout_log_probs": [[-1.0, -1.0]],
    }
    given = batch_from_columns(columns | {"teacher_log_probs": [[-0.5, -0.25]]}).teacher_log_probs
    assert given is not None and given.tolist() == [-0.5, -0.25]
    assert batch_from_columns(columns).teacher_log_probs is None


def test_scorer_asks_the_teacher_once_and_rewards_come_from_elsewhere(make_args):
    args = dataclasses.replace(make_args(), use_opd=True, opd_type="sglang", rm_type="zero")
    server = FakeTeacher()

    async def main() -> tuple[Sample, Any]:
        async with server:
            scorer = RewardScorer.from_args(
                dataclasses.replace(args, rm_url=server.url), graders=GraderPool(time_limit_s=5.0, size=1)
            )
            try:
                one, own = sample(), sample(1)
                own.teacher_log_probs = [-7.0] * 4  # by a custom function
                reward = await scorer.score(one, RewardConfig(None, "zero"))
                for each in (one, one, own):
                    await scorer.score_tokens(each)
                assert own.teacher_log_probs == [-7.0] * 4 and scorer.column_of_tokens == "teacher_log_probs"
                return one, reward
            finally:
                scorer.close()

    one, reward = asyncio.run(main())
    assert len(server.asked) == 1 and len(one.teacher_log_probs or []) == 4 and reward == 0.0
    assert json.loads(json.dumps(one.to_dict()))["teacher_log_probs"] == one.teacher_log_probs
    alone = RewardScorer.from_args(args, graders=GraderPool(time_limit_s=5.0, size=1))
    assert alone.column_of_tokens is None  # without an address, custom functions set the values
    alone.close()
