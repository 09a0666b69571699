"""Which samples are unfinished, in which stage and at which line."""

from __future__ import annotations

import asyncio
import sys
import threading

from slimrl.data.sample import Sample
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.generation.sample_tracker import SampleTracker, running_line
from slimrl.rollout.rollout_generator import RolloutGenerator

HOOKS = """
import asyncio
from slimrl.data.sample import SampleStatus

async def generate(args, sample, sampling_params):
    if sample.index == 5:
        await wait_for_ever()
    sample.tokens = sample.tokens + [1]
    sample.response_length, sample.response, sample.loss_mask = 1, "x", [1]
    sample.rollout_log_probs, sample.status = [-1.0], SampleStatus.COMPLETED
    return sample

async def wait_for_ever():
    await asyncio.gather(asyncio.Event().wait())

async def reward(args, sample):
    if sample.index == 2:
        await asyncio.sleep(600)
    return 1.0
"""


def test_two_hung_samples_are_named_with_stage_and_line(make_args, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "hanging_hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    args = make_args(
        custom_generate_function_path="hanging_hooks.generate", custom_rm_path="hanging_hooks.reward", rm_type=None
    )

    async def scenario():
        generator = RolloutGenerator.from_args(args, tokenizer, client=None)
        rollout = asyncio.create_task(generator.generate_rollout(0, RolloutDataSource(args, tokenizer)))
        while generator.progress() != (6, 8):
            await asyncio.sleep(0)
        where = await asyncio.to_thread(generator.active_samples)
        rollout.cancel()
        await asyncio.gather(rollout, return_exceptions=True)
        left = generator.active_samples()
        generator.close()
        return where, left

    where, left = asyncio.run(scenario())
    file = tmp_path / "hanging_hooks.py"
    assert {(sample.index, sample.group_index, sample.stage, sample.line) for sample in where} == {
        (5, 2, "generation", f"{file}:14 wait_for_ever"),
        (2, 1, "the reward", f"{file}:18 reward"),
    }
    assert left == []


def test_sample_may_be_in_two_stages_concurrently():
    sample, tracker = Sample(prompt="?", index=3), SampleTracker()

    async def scenario():
        with tracker.at(sample, "generation"):
            with tracker.at(sample, "a judge"):
                both = [where.stage for where in tracker.snapshot()]
            return both, [where.stage for where in tracker.snapshot()]

    assert asyncio.run(scenario()) == (["generation", "a judge"], ["generation"])
    assert tracker.snapshot() == []
    sys.modules.pop("hanging_hooks")


def test_line_of_a_thread_is_the_innermost_outside_libraries():
    ready, go = threading.Event(), threading.Event()

    def waits():
        ready.set()
        go.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    ready.wait()
    while not (line := running_line(sys._current_frames()[thread.ident])).endswith(" waits"):
        pass
    go.set()
    thread.join()
    assert line == f"{__file__}:{waits.__code__.co_firstlineno + 2} waits"
    assert running_line(None) == ""
