"""What is lost is replaced in order: ended, started again, given weights, and only then asked; up to a limit."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import http.server
import json
import threading
import time
import types
from pathlib import Path

import pytest

from slimrl.cluster.engines import engine_recovery as recovery_module
from slimrl.cluster.engines import router_supervisor
from slimrl.cluster.engines.engine import Engine, ServerExit
from slimrl.cluster.engines.engine_group import ExternalEngine
from slimrl.cluster.engines.engine_recovery import MAX_LOSSES, EngineRecovery
from slimrl.cluster.engines.health_monitor import HealthConfig, HealthMonitor
from slimrl.engines.sglang.control import ServerLoad
from slimrl.engines.sglang.engine_memory import EVERYTHING, EngineMemory
from slimrl.processes import ProcessStartError
from slimrl.weights.update.topology import EngineEndpoint
from tests.megatron.launch import free_port

NEVER = HealthConfig(1000.0, 1000.0, 0.0)


class FakeEngine:
    """A server that exists as a list of what was done to it."""

    what_follows, arrived = Engine.what_follows, Engine.arrived

    def __init__(self, index: int, life: int = 0, url: str | None = None) -> None:
        self.index, self.life = index, life
        self.name = f"{index}.{life}"
        self.url = url or f"http://127.0.0.1:{1000 + 10 * index + life}"
        self.done: list[str] = []
        self.end: asyncio.Future[ServerExit] = asyncio.get_running_loop().create_future()

    @property
    def endpoint(self) -> EngineEndpoint:
        return EngineEndpoint(self.url, gpus=[self.index], life=self.life)

    def die(self) -> None:
        self.end.set_result(
            ServerExit(f"SGLang server {self.name} died with exit code -9", Path("log"), "its last words")
        )

    async def watch(self) -> ServerExit:
        return await self.end

    async def start(self, timeout_s: float) -> None:
        self.done.append("started")

    async def kill(self) -> None:
        self.done.append("killed")

    async def stopped(self) -> list[str]:
        return []

    async def last_log_lines(self) -> tuple[Path, str]:
        return Path("log"), ""


class FakeRouter:
    """A router that knows servers, and can die."""

    url, port, log_path = "http://127.0.0.1:1", 1, Path("logs/router.log")

    def __init__(self) -> None:
        self.known: list[str] = []
        self.logs: list[str] = []
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def restart(self, log_path: Path) -> None:
        self.known, self.code = [], None
        self.logs.append(log_path.name)  # last: the test continues then, from another thread

    def wait_alive(self, timeout_s: float) -> None: ...

    def wait_ready(self, count: int, timeout_s: float) -> None:
        assert len(self.known) >= count

    def workers(self) -> list[dict[str, str]]:
        return [{"url": url} for url in self.known]

    def add_worker(self, url: str) -> None:
        self.known.append(url)

    def remove_worker(self, url: str) -> None:
        self.known.remove(url)

    def last_log_lines(self, count: int) -> str:
        return "the router's last words"


class FakeFleet:
    def __init__(self, count: int) -> None:
        self.engines = [FakeEngine(index) for index in range(count)]
        self.same_urls = False  # as servers of the user's have, when they are started again
        self.router = FakeRouter()
        self.router.known = [engine.url for engine in self.engines]

    def replace_engine(self, index: int) -> FakeEngine:
        old = self.engines[index]
        self.engines[index] = FakeEngine(index, old.life + 1, old.url if self.same_urls else None)
        return self.engines[index]


@contextlib.asynccontextmanager
async def recovering(count: int = 2, flags: HealthConfig = NEVER, *, weights_come: bool = True):
    fleet = FakeFleet(count)
    client = types.SimpleNamespace(server_urls=[engine.url for engine in fleet.engines], resent=0)
    memory = EngineMemory([])
    recovery = EngineRecovery(flags, fleet, client, memory, weights_come=weights_come)
    await asyncio.sleep(0)
    try:
        yield recovery, fleet, client, memory
    finally:
        await recovery.close()


async def until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


def test_a_lost_server_is_ended_and_its_successor_is_asked_only_when_it_has_weights():
    async def body():
        async with recovering() as (recovery, fleet, client, _):
            lost, other = fleet.engines
            lost.die()
            news = await recovery.news(0)
            assert "SGLang server 0.0 died with exit code -9 (log: log)" in news.lines[0]
            await until(lambda: recovery._places[0].phase.value == "waiting")
            new = fleet.engines[0]
            assert (lost.done, new.done, other.done) == (["killed"], ["started"], [])
            assert fleet.router.known == client.server_urls == [other.url]
            standing = await recovery.standing()
            assert ([endpoint.url for endpoint in standing.waiting], standing.serving) == ([new.url], 1)

            assert await recovery.begin_weight_update(True) == [new.endpoint]
            assert fleet.router.known == [other.url]
            await recovery.end_weight_update([new.url], "7")
            assert sorted(fleet.router.known) == sorted(client.server_urls) == sorted([new.url, other.url])
            client.resent = 5
            assert recovery.take_metrics() == {
                "rollout/faults/servers_lost": 1.0,
                "rollout/faults/servers_replaced": 1.0,
                "rollout/faults/router_restarts": 0.0,
                "rollout/faults/requests_resent": 5.0,
            }
            assert set(recovery.take_metrics().values()) == {0.0}

    asyncio.run(body())


def test_a_server_that_came_back_at_its_address_during_a_weight_update_does_not_serve_with_weights_it_was_not_given():
    async def body():
        async with recovering() as (recovery, fleet, client, _):
            fleet.same_urls = True
            back, other = fleet.engines
            urls = [endpoint.url for endpoint in await recovery.begin_weight_update(False)]
            back.die()
            await until(lambda: recovery._places[0].phase.value == "waiting")
            await recovery.end_weight_update(urls, "7")
            assert fleet.router.known == client.server_urls == [other.url]
            (waiting,) = (await recovery.standing()).waiting
            assert (waiting.url, waiting.life) == (back.url, 1)

    asyncio.run(body())


def test_a_failed_weight_update_counts_a_server_that_came_back_at_its_address_as_lost(monkeypatch):
    monkeypatch.setattr(recovery_module, "DEATH_GRACE_S", 0.0)

    async def body():
        with StandIn() as well:
            async with recovering() as (recovery, fleet, _, _memory):
                fleet.same_urls = True
                fleet.engines[1].url = well.url
                urls = [endpoint.url for endpoint in await recovery.begin_weight_update(False)]
                fleet.engines[0].die()
                await until(lambda: recovery._places[0].phase.value == "waiting")
                assert await recovery.weight_update_failed(urls) == [urls[0]]

    asyncio.run(body())


def test_nobody_blames_the_successor_of_a_server_that_was_ill(monkeypatch):
    monkeypatch.setattr(recovery_module, "DEATH_GRACE_S", 0.0)

    async def body():
        async with recovering(1, HealthConfig(1000.0, 0.5, 0.0)) as (recovery, fleet, _, _memory):
            first = fleet.engines[0]
            first.url = f"http://127.0.0.1:{free_port()}"  # nobody answers there
            await recovery.begin_weight_update(False)
            failed = asyncio.create_task(recovery.weight_update_failed([first.url]))
            await asyncio.sleep(0.1)  # the probe is in progress
            first.die()
            await until(lambda: recovery._places[0].phase.value == "waiting")
            assert await failed == [first.url]
            recovery._blame(recovery._places[0], first, "failed a call")
            await asyncio.sleep(0.1)
            assert (fleet.engines[0].life, fleet.engines[0].done) == (1, ["started"])

    asyncio.run(body())


def test_a_rollout_forgives_no_loss_that_came_while_the_servers_were_asked(monkeypatch):
    async def body():
        async with recovering(1) as (recovery, fleet, _, _memory):
            asked, told = threading.Event(), threading.Event()

            def load_of(url: str, timeout_s: float, key: str | None) -> ServerLoad:
                asked.set()
                told.wait(10)
                return ServerLoad(url, 0, 0, 0.0, prefilled=True)

            monkeypatch.setattr(recovery_module, "load_of", load_of)
            ends = asyncio.create_task(recovery.generation_ends())
            await until(asked.is_set)
            fleet.engines[0].die()
            await until(lambda: fleet.engines[0].life == 1)
            told.set()
            await ends
            assert recovery._places[0].losses == 1

    asyncio.run(body())


def test_without_training_a_successor_has_its_weights_from_the_start():
    async def body():
        async with recovering(1, weights_come=False) as (_, fleet, client, _memory):
            fleet.engines[0].die()
            await until(lambda: client.server_urls == [fleet.engines[0].url] and fleet.engines[0].life == 1)
            await until(lambda: sorted(fleet.router.known) == client.server_urls)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("kind", "weights_come", "lost", "back"),
    [
        (Engine, True, "another takes its place", "started and waits for weights"),
        (ExternalEngine, True, "it is left out until it is back", "is back and waits for weights"),
        (ExternalEngine, False, "it is left out until it is back", "is back and serves"),
    ],
)
def test_only_a_server_of_the_runs_is_said_to_be_replaced_and_started(monkeypatch, kind, weights_come, lost, back):
    monkeypatch.setattr(FakeEngine, "what_follows", kind.what_follows)
    monkeypatch.setattr(FakeEngine, "arrived", kind.arrived)

    async def body():
        async with recovering(1, weights_come=weights_come) as (recovery, fleet, _, _memory):
            fleet.engines[0].die()
            await until(lambda: len(recovery._events) == 2)
            assert recovery._events == [
                f"SGLang server 0.0 died with exit code -9 (log: log); {lost}",
                f"SGLang server 0.1 ({fleet.engines[0].url}) {back}",
            ]

    asyncio.run(body())


def test_a_whole_weight_update_waits_for_a_server_where_there_is_none():
    async def body():
        async with recovering(1) as (recovery, fleet, _, _memory):
            fleet.engines[0].die()
            await recovery.news(0)
            assert [endpoint.url for endpoint in await recovery.begin_weight_update(False)] == [fleet.engines[0].url]
            assert fleet.engines[0].life == 1

    asyncio.run(body())


def test_a_server_that_dies_again_and_again_ends_the_run_with_its_last_lines():
    async def body():
        async with recovering(2) as (recovery, fleet, _, _memory):
            for life in range(MAX_LOSSES):
                await until(
                    lambda life=life: fleet.engines[1].life == life and recovery._places[1].phase.value != "lost"
                )
                fleet.engines[1].die()
            message = await asyncio.wait_for(recovery.watch(), 10)
            assert f"SGLang server 1.{MAX_LOSSES - 1} died with exit code -9" in message
            assert "its last words" in message and f"lost {MAX_LOSSES} times in a row" in message

    asyncio.run(body())


def test_no_server_starts_while_training_has_the_gpus():
    async def body():
        async with recovering(1) as (recovery, fleet, _, memory):
            memory.servers = []
            await recovery.release_memory()
            fleet.engines[0].die()
            await recovery.news(0)
            await asyncio.sleep(0.05)
            assert fleet.engines[0].life == 0
            await recovery.resume_memory(EVERYTHING[:1])
            await asyncio.sleep(0.05)
            assert fleet.engines[0].life == 0
            await recovery.resume_memory(EVERYTHING[1:])
            await until(lambda: recovery._places[0].phase.value == "waiting")
            assert fleet.engines[0].life == 1

    asyncio.run(body())


def test_a_dead_router_comes_back_with_the_servers_that_serve():
    async def body():
        async with recovering(2) as (recovery, fleet, client, _):
            fleet.router.code = -9
            await until(lambda: sorted(fleet.router.known) == client.server_urls)
            await until(lambda: recovery.take_metrics()["rollout/faults/router_restarts"] == 1.0)
            assert fleet.router.logs == ["router.1.log"]
            for restarts in range(1, MAX_LOSSES):
                await until(lambda restarts=restarts: len(fleet.router.logs) == restarts)
                await until(lambda: sorted(fleet.router.known) == client.server_urls)
                fleet.router.code = -11
            message = await asyncio.wait_for(recovery.watch(), 10)
            assert "died with exit code -11; last lines of its log:\nthe router's last words" in message

    asyncio.run(body())


class StandIn:
    """Answers as a server whose scheduler last spoke `silent_s` ago, and which answers questions or not."""

    def __init__(self, silent_s: float = 0.0, *, answers: bool = True, running: int = 0) -> None:
        self.silent_s, self.answers, self.running = silent_s, answers, running
        stand_in = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/server_info" and not stand_in.answers:
                    stand_in.hang.wait(5)
                now = datetime.datetime.now(datetime.UTC)
                load = {"num_running_reqs": stand_in.running, "num_waiting_reqs": 0, "total_prefill_uncached_tokens": 9}
                load["timestamp"] = now.timestamp() - stand_in.silent_s
                body = json.dumps({"timestamp": now.isoformat(), "loads": [load]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

            def log_message(self, *_): ...

        self.hang = threading.Event()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    async def stopped(self) -> list[str]:
        return []

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.hang.set()
        self.server.shutdown()
        self.server.server_close()


def probed(server, *, updating_weights: bool = False) -> str | None:
    async def body():
        monitor = HealthMonitor(HealthConfig(0.01, 0.2, 0.0), 1)
        monitor.updating_weights = updating_weights
        try:
            return await monitor.probe(server)
        finally:
            monitor.close()

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("silent_s", "answers", "updating_weights", "ill"),
    [
        (0.0, True, False, False),  # at work
        (60.0, True, False, False),  # idle or paused: it says nothing by itself, but answers
        (60.0, False, False, True),  # hangs
        (60.0, False, True, False),  # waits in a broadcast
    ],
)
def test_a_server_is_well_while_its_scheduler_speaks_or_answers(silent_s, answers, updating_weights, ill):
    with StandIn(silent_s, answers=answers, running=3) as server:
        found = probed(server, updating_weights=updating_weights)
    expected = "has had a scheduler without a sign of life with 3 requests running and 0 queued for 0.2 s"
    assert found == (f"{expected} (--rollout-health-check-timeout)" if ill else None)


def test_a_server_that_does_not_answer_or_is_stopped_is_ill():
    nobody = types.SimpleNamespace(url=f"http://127.0.0.1:{free_port()}")
    assert probed(nobody) == "has not answered for 0.2 s (--rollout-health-check-timeout)"
    with StandIn() as server:

        async def stopped():
            return ["sglang::scheduler (7)"]

        server.stopped = stopped
        assert "has had stopped processes, sglang::scheduler (7), for 0.2 s" in probed(server)


@pytest.mark.timeout(20)
def test_a_server_whose_actor_hangs_is_ill():
    with StandIn() as server:

        async def stopped():
            await asyncio.Event().wait()

        server.stopped = stopped
        assert "has had an actor that does not answer for 0.2 s" in probed(server)


@pytest.mark.timeout(20)
def test_a_log_that_nobody_reads_out_and_a_start_that_never_ends_stop_no_replacement(monkeypatch):
    monkeypatch.setattr(recovery_module, "LOG_TIMEOUT_S", 0.05)
    monkeypatch.setattr(recovery_module, "START_LIMIT_S", 0.05)

    async def hang(*_):
        await asyncio.Event().wait()

    async def body():
        async with recovering(1) as (recovery, fleet, _, _memory):
            fleet.engines[0].last_log_lines = hang
            replace_engine, starts = fleet.replace_engine, [hang]

            def renewed(index: int) -> FakeEngine:
                engine = replace_engine(index)
                if starts:
                    engine.start = starts.pop()
                return engine

            fleet.replace_engine = renewed
            recovery._blame(recovery._places[0], fleet.engines[0], "failed a call")
            await until(lambda: recovery._places[0].phase.value == "waiting")
            assert fleet.engines[0].life == 2
            assert any("did not start: it was not there after 0.05 s" in line for line in recovery._events)

    asyncio.run(body())


def test_losses_with_a_long_service_in_between_are_not_in_a_row(monkeypatch):
    monkeypatch.setattr(recovery_module, "LONG_LIFE_S", 0.0)

    async def body():
        async with recovering(1, weights_come=False) as (recovery, fleet, client, _):
            for life in range(MAX_LOSSES + 1):
                await until(lambda life=life: fleet.engines[0].life == life and client.server_urls)
                fleet.engines[0].die()
                await until(lambda life=life: fleet.engines[0].life == life + 1)
            assert recovery._places[0].losses == 1

    asyncio.run(body())


def test_training_that_waits_for_the_start_of_a_server_says_so():
    async def body():
        async with recovering(1) as (recovery, fleet, _, memory):
            memory.release = lambda: None
            replace_engine, started = fleet.replace_engine, asyncio.Event()

            def renewed(index: int) -> FakeEngine:
                engine = replace_engine(index)
                engine.start = lambda _: started.wait()
                return engine

            fleet.replace_engine = renewed
            fleet.engines[0].die()
            await until(lambda: fleet.engines[0].life == 1)
            release = asyncio.create_task(recovery.release_memory())
            line = (await asyncio.wait_for(recovery.news(1), 10)).lines[0]
            assert line == "training waits for the start of SGLang server 0.1, which has the memory that it needs"
            assert not release.done()
            started.set()
            await asyncio.wait_for(release, 10)

    asyncio.run(body())


def test_a_router_that_cannot_start_is_tried_again_after_a_pause_and_its_port_is_named(monkeypatch):
    monkeypatch.setattr(router_supervisor, "RESTART_PAUSE_S", 0.5)

    async def body():
        async with recovering(1) as (recovery, fleet, _, _memory):
            restart, tries = fleet.router.restart, []

            def restarted(log_path: Path) -> None:
                tries.append(time.monotonic())
                if len(tries) == 1:
                    raise ProcessStartError("it died with exit code 1")
                restart(log_path)

            fleet.router.restart = restarted
            fleet.router.code = -9
            await until(lambda: fleet.router.known == [fleet.engines[0].url] and len(tries) == 2)
            assert tries[1] - tries[0] >= 0.5
            assert any("maybe because its port 1 is taken: it died with exit code 1" in e for e in recovery._events)

    asyncio.run(body())


def test_losses_of_the_router_with_a_long_life_in_between_are_not_in_a_row(monkeypatch):
    monkeypatch.setattr(router_supervisor, "LONG_LIFE_S", 0.0)

    async def body():
        async with recovering(1) as (recovery, fleet, _, _memory):
            for restarts in range(1, MAX_LOSSES + 2):
                fleet.router.code = -9
                await until(lambda restarts=restarts: len(fleet.router.logs) == restarts)
                await until(lambda: fleet.router.known == [fleet.engines[0].url])

    asyncio.run(body())


def test_a_server_that_took_part_in_a_complete_rollout_may_die_again():
    async def body():
        with StandIn() as server:
            async with recovering(1) as (recovery, fleet, _, _memory):
                place = recovery._places[0]
                place.losses, place.engine.url = MAX_LOSSES - 1, server.url
                await recovery.generation_ends()
                assert place.losses == 0

    asyncio.run(body())
