"""Request statistics of servers, summed: caches, drafts and latencies."""

import asyncio
import json

import pytest

from slimrl.engines.protocol import RequestStats, time_statistics
from slimrl.engines.sglang.responses import ResponseReader
from slimrl.observability.metrics import metric_of
from slimrl.observability.metrics.registry import METRICS


def answer(**meta) -> bytes:
    usual = {"id": "r", "finish_reason": {"type": "stop"}, "weight_version": "1", "output_token_logprobs": [[-1.0, 7]]}
    return json.dumps({"output_ids": [7], "text": "x", "meta_info": usual | meta}).encode()


def test_response_stats_are_summed_and_reset_when_read():
    stats = RequestStats()
    ResponseReader().generation(answer(prompt_tokens=10, cached_tokens=8, e2e_latency=2.0, queue_time=0.5), stats)
    ResponseReader().generation(answer(prompt_tokens=30, cached_tokens=2, e2e_latency=4.0), stats)
    drafts = {"spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 9, "spec_verify_ct": 3, "completion_tokens": 9}
    ResponseReader().generation(answer(prompt_tokens=10, e2e_latency=3.0, **drafts), stats)
    taken = stats.take(samples=2)
    assert taken["rollout/prefix_cache_hit_rate"] == 10 / 50
    assert taken["rollout/avg_cached_tokens_per_sample"] == 5.0
    assert (taken["rollout/spec_accept_rate"], taken["rollout/spec_accept_length"]) == (6 / 9, 3.0)
    assert taken["perf/request/e2e_latency/mean"] == taken["perf/request/e2e_latency/median"] == 3.0
    assert taken["perf/request/queue_time/max"] == 0.5
    assert [name for name in taken if metric_of(name, METRICS) is None] == []
    assert stats.take(samples=2) == {}


def test_response_without_stats_counts_nothing():
    stats = RequestStats()
    ResponseReader().generation(answer(), stats)
    assert stats.take(samples=1) == {}


def test_evaluation_does_not_affect_the_request_stats_of_a_rollout():
    stats = RequestStats()

    async def ask(prompt_tokens):
        await asyncio.sleep(0)
        ResponseReader().generation(answer(prompt_tokens=prompt_tokens, cached_tokens=5), stats)

    def in_a_thread(loop):
        asyncio.run_coroutine_threadsafe(ask(1000), loop).result()

    async def evaluation():
        with stats.apart():
            await asyncio.gather(ask(1000), asyncio.to_thread(in_a_thread, asyncio.get_running_loop()))

    async def main():
        await asyncio.gather(ask(10), evaluation(), ask(10))
        await ask(30)

    asyncio.run(main())
    assert stats.take(samples=3)["rollout/prefix_cache_hit_rate"] == 15 / 50


@pytest.mark.parametrize(("number", "p99"), [(1, 0.0), (100, 98.0), (101, 99.0), (1000, 989.0)])
def test_p99_is_the_nearest_rank(number, p99):
    found = time_statistics([float(value) for value in reversed(range(number))])
    assert (found["p99"], found["max"], found["min"]) == (p99, number - 1, 0.0)
