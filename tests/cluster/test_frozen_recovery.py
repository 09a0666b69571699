"""Lost servers of frozen models are replaced and serve without a weight update; the policy's recovery reports them."""

from __future__ import annotations

import asyncio

from slimrl.cluster.engines.engine_recovery import MAX_LOSSES
from slimrl.cluster.engines.frozen_models import FrozenModels
from slimrl.cluster.engines.other_servers import OtherServers, RewardServers, RunRecovery
from slimrl.engines.server_protocol import EngineMemory
from tests.cluster.test_engine_recovery import NEVER, FakeClient, FakeEngine, FakeFleet, until


def supervised(body):
    """Runs `body(recovery, policy, judge, frozen)` with two servers of the policy and one of a judge."""

    async def run() -> None:
        policy, judge = FakeFleet(2), FakeFleet(1)
        frozen = FrozenModels({"judge": judge}, {"judge": EngineMemory([])})
        client = FakeClient([engine.url for engine in policy.engines])
        options = {"needs_weight_sync": True, "concurrency": 8, "elastic": None}
        recovery = RunRecovery(NEVER, policy, client, EngineMemory([]), OtherServers(frozen=frozen), **options)
        await asyncio.sleep(0)
        try:
            await body(recovery, policy, judge, frozen)
        finally:
            await recovery.close()

    asyncio.run(run())


def test_replacement_serves_at_once_and_is_reported_and_counted_with_the_policys():
    async def body(recovery, policy, judge, frozen):
        lost = judge.engines[0]
        lost.die()
        policy.engines[1].die()
        await until(lambda: judge.engines[0].life == 1 and judge.router.known == [judge.engines[0].url])
        assert (lost.done, judge.engines[0].done) == (["killed"], ["started"])
        await until(lambda: len(recovery._events) == 4)
        lines = (await recovery.events(0)).lines
        (started,) = (line for line in lines if "started and serves" in line)
        assert judge.engines[0].url in started
        (waiting,) = (await recovery.status()).waiting  # the policy's alone gets a weight update
        assert waiting.url == policy.engines[1].url
        counts = recovery.take_metrics()
        assert counts["rollout/faults/servers_lost"] == 2 and counts["rollout/faults/servers_replaced"] == 1

    supervised(body)


def test_frozen_server_that_is_lost_again_and_again_ends_the_run_by_name():
    async def body(recovery, policy, judge, frozen):
        others = asyncio.Event()

        async def policy_lives() -> str:
            await others.wait()
            return "the policy ended"

        watch = asyncio.create_task(frozen.watch(policy_lives()))
        for life in range(MAX_LOSSES):
            await until(lambda life=life: judge.engines[0].life == life and not watch.done())
            judge.engines[0].die()
        end = await asyncio.wait_for(watch, 10)
        assert end.startswith("a process of the frozen model judge has ended: SGLang server 0.2 died")
        assert f"it was lost {MAX_LOSSES} times in a row" in end

    supervised(body)


def test_frozen_server_lost_while_training_has_the_gpus_starts_when_memory_is_resumed():
    async def body(recovery, policy, judge, frozen):
        await frozen.release_memory()
        judge.engines[0].die()
        await until(lambda: judge.router.known == [])
        await asyncio.sleep(0.1)
        assert judge.engines[0].life == 0  # training has the memory
        await frozen.resume_memory(frozen.gpu_memory["judge"].released)
        await until(lambda: judge.router.known == [judge.engines[0].url])
        assert judge.engines[0].life == 1

    supervised(body)


class FakeReward(RewardServers):
    """Two servers of a reward model without processes; a replacement is at another address, as on a spare node."""

    def replace_engine(self, index: int) -> FakeEngine:
        self.engines[index] = FakeEngine(10 + index, self.engines[index].life + 1)
        return self.engines[index]


def test_clients_of_a_reward_model_are_told_the_address_of_a_server_on_a_spare_node():
    async def run() -> None:
        policy, moved = FakeFleet(1), []
        reward = FakeReward([FakeEngine(10), FakeEngine(11)])
        reward.when_moved = lambda old, new: moved.append((old, new))
        client = FakeClient([engine.url for engine in policy.engines])
        options = {"needs_weight_sync": True, "concurrency": 8, "elastic": None}
        recovery = RunRecovery(NEVER, policy, client, EngineMemory([]), OtherServers(reward=reward), **options)
        await asyncio.sleep(0)
        try:
            for life in range(2):
                lost = reward.engines[1]
                lost.die()
                await until(lambda life=life: len(moved) == life + 1)
                assert moved[life] == (lost.url, reward.engines[1].url) and lost.url != reward.engines[1].url
                await reward.recovery.generation_ends()
            assert reward.engines[0].life == 0
        finally:
            await recovery.close()

    asyncio.run(run())


def test_gpu_is_free_for_further_servers_when_the_policys_replacement_has_started(monkeypatch):
    """Each takes a fraction of the free memory: two that start at once would take it twice."""

    async def body(recovery, policy, judge, frozen):
        may_start = asyncio.Event()

        async def start(engine, timeout_s):
            await may_start.wait()

        monkeypatch.setattr(FakeEngine, "start", start)
        lost = policy.engines[1]
        lost.die()
        await until(lambda: policy.engines[1] is not lost)
        waiting = asyncio.ensure_future(recovery.started_on([1, 2]))
        await asyncio.wait_for(recovery.started_on([0, 7]), 10)  # nothing was lost there
        await asyncio.sleep(0.05)
        assert not waiting.done()
        may_start.set()
        await asyncio.wait_for(waiting, 10)

    supervised(body)
