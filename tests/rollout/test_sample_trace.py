"""Requests, tool calls and rewards of a rollout in the timeline."""

from __future__ import annotations

import asyncio

from slimrl.engines.protocol import Generation
from slimrl.observability.timeline import merge
from slimrl.observability.tracer import Timeline
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.generation.sample_tracker import SampleTrace
from slimrl.rollout.rollout_generator import RolloutGenerator
from tests.observability.trace_format import read_trace

TURNS = """
async def generate(args, sample, sampling_params, engine):
    import asyncio
    from slimrl.data.sample import SampleStatus
    from slimrl.rollout.generation.multi_turn import append_generation
    for turn in range(3):
        append_generation(sample, await engine.generate(sample.tokens, sampling_params))
        await asyncio.sleep(0.01)
    sample.status = SampleStatus.COMPLETED
    return sample
"""


class Engine:
    """Answers one token after 20 ms, 5 of them in the queue."""

    async def generate(self, input_ids, sampling_params, session_id=None):
        import time

        await asyncio.sleep(0.005)
        sent = time.monotonic_ns()
        await asyncio.sleep(0.015)
        return Generation([65], [-1.0], "stop", "7", "A", sent_ns=sent)

    async def abort_all(self): ...


def trace_of(tmp_path, args, tokenizer, limit):
    timeline = Timeline(tmp_path / "run" / "timeline" / "rollout-manager.jsonl", "rollout manager")

    async def scenario():
        generator = RolloutGenerator.from_args(args, tokenizer, Engine(), SampleTrace(timeline, limit))
        source = RolloutDataSource(args, tokenizer)
        for rollout_id in range(2):
            await generator.generate_rollout(rollout_id, source)
        generator.close()

    asyncio.run(scenario())
    timeline.close()
    return read_trace(merge(tmp_path / "run").path)


def test_every_sample_has_one_request_span_from_its_sending_and_one_reward_span(make_args, tokenizer, tmp_path):
    trace = trace_of(tmp_path, make_args(), tokenizer, limit=100)
    requests = trace.of("rollout manager", row="requests")
    assert sorted((span.facts["rollout"], span.facts["sample"]) for span in requests) == [
        (n // 8, n) for n in range(16)
    ]
    for span in requests:
        assert (span.facts["tokens"], span.facts["finish"], span.facts["version"]) == (1, "stop", "7")
        assert 1000 * span.seconds >= 15 and span.facts["waited_ms"] >= 5
    assert sorted(span.name for span in trace.of("rollout manager", row="rewards")) == sorted(
        f"sample {number}" for number in range(16)
    )
    assert trace.remarks == []


def test_time_between_two_requests_of_a_sample_is_shown(make_args, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "three_turns.py").write_text(TURNS)
    monkeypatch.syspath_prepend(tmp_path)
    args = make_args(custom_generate_function_path="three_turns.generate")
    trace = trace_of(tmp_path, args, tokenizer, limit=100)
    assert len(trace.of("rollout manager", row="requests")) == 3 * 16
    between = trace.of("rollout manager", row="between requests")
    assert len(between) == 2 * 16 and all(span.seconds >= 0.01 for span in between)


def test_only_the_requested_number_of_samples_is_traced_and_the_rest_counted(make_args, tokenizer, tmp_path):
    trace = trace_of(tmp_path, make_args(), tokenizer, limit=3)
    assert len(trace.of("rollout manager", row="requests")) == 2 * 3
    assert set(trace.remarks) == {
        "5 of 8 requests are not shown (--timeline-requests)",
        "5 of 8 rewards are not shown (--timeline-requests)",
    }
