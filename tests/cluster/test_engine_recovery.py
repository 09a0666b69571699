"""Failed engines are stopped, restarted, updated with weights and only then used again, up to a limit."""

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
from slimrl.cluster.engines.engine import Engine
from slimrl.cluster.engines.engine_group import ExternalEngine
from slimrl.cluster.engines.engine_recovery import MAX_LOSSES, EngineRecovery
from slimrl.cluster.engines.health_monitor import HealthConfig, HealthMonitor, ServerExit
from slimrl.engines.http import is_reachable
from slimrl.engines.server_protocol import EVERYTHING, EngineMemory, ServerLoad
from slimrl.engines.sglang.control import ServerControl
from slimrl.processes import ProcessStartError
from slimrl.weights.update.topology import EngineEndpoint
from tests.megatron.launch import free_port

NEVER = HealthConfig(1000.0, 1000.0, 0.0)


class FakeEngine:
    """A server that records the calls made to it."""

    lost_message, started_message = Engine.lost_message, Engine.started_message

    def __init__(self, index: int, life: int = 0, url: str | None = None) -> None:
        self.index, self.life = index, life
        self.name = f"{index}.{life}"
        self.label = f"SGLang server {self.name}"
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

    async def placed(self) -> None: ...

    async def start(self, timeout_s: float) -> None:
        self.done.append("started")

    async def kill(self) -> None:
        self.done.append("killed")

    async def stopped(self) -> list[str]:
        return []

    def control(self, timeout_s: float = 1.0) -> ServerControl:
        return ServerControl(self.url, timeout_s)

    async def last_log_lines(self) -> tuple[Path, str]:
        return Path("log"), ""


class FakeRouter:
    """A router with a list of servers, which can die."""

    label, url, port, log_path = "the SGLang router", "http://127.0.0.1:1", 1, Path("logs/router.log")

    def __init__(self) -> None:
        self.known: list[str] = []
        self.logs: list[str] = []
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def restart(self, log_path: Path) -> None:
        self.known, self.code = [], None
        self.logs.append(log_path.name)  # last, because the test then continues from another thread

    def wait_alive(self, timeout_s: float) -> None: ...

    def wait_ready(self, count: int, timeout_s: float) -> None:
        assert len(self.known) >= count

    def responds(self, timeout_s: float) -> bool:
        return is_reachable(f"{self.url}/health", timeout_s)

    def server_urls(self) -> list[str]:
        return list(self.known)

    def add_workers(self, urls) -> None:
        for url in urls:
            self.add_worker(url)

    def add_worker(self, url: str) -> None:
        self.known.append(url)

    def remove_worker(self, url: str) -> None:
        self.known.remove(url)

    def last_log_lines(self, count: int) -> str:
        return "the router's last words"


class FakeFleet:
    def __init__(self, count: int) -> None:
        self.engines = [FakeEngine(index) for index in range(count)]
        self.same_urls = False  # like external servers that are restarted
        self.router = FakeRouter()
        self.router.known = [engine.url for engine in self.engines]

    def replace_engine(self, index: int) -> FakeEngine:
        old = self.engines[index]
        self.engines[index] = FakeEngine(index, old.life + 1, old.url if self.same_urls else None)
        return self.engines[index]


class FakeClient:
    def __init__(self, server_urls: list[str]) -> None:
        self.server_urls, self.resent, self.concurrency = server_urls, 0, 0

    def set_concurrency(self, requests: int) -> None:
        self.concurrency = requests


@contextlib.asynccontextmanager
async def recovering(count: int = 2, flags: HealthConfig = NEVER, *, needs_weight_sync: bool = True, elastic=None):
    fleet = FakeFleet(count)
    client = FakeClient([engine.url for engine in fleet.engines])
    memory = EngineMemory([])
    recovery = EngineRecovery(
        flags, fleet, client, memory, needs_weight_sync=needs_weight_sync, concurrency=8, elastic=elastic
    )
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


def test_failed_server_is_stopped_and_its_replacement_serves_only_with_weights():
    async def body():
        async with recovering() as (recovery, fleet, client, _):
            lost, other = fleet.engines
            lost.die()
            events = await recovery.events(0)
            assert "SGLang server 0.0 died with exit code -9 (log: log)" in events.lines[0]
            await until(lambda: recovery._slots[0].phase.value == "waiting")
            new = fleet.engines[0]
            assert (lost.done, new.done, other.done) == (["killed"], ["started"], [])
            assert fleet.router.known == client.server_urls == [other.url]
            standing = await recovery.status()
            assert ([endpoint.url for endpoint in standing.waiting], standing.serving) == ([new.url], 1)

            assert await recovery.begin_weight_update(True) == [new.endpoint]
            assert fleet.router.known == [other.url]
            await recovery.end_weight_update([new.url], "7")
            assert sorted(fleet.router.known) == sorted(client.server_urls) == sorted([new.url, other.url])
            client.resent = 5
            assert recovery.take_metrics() == {
                "rollout/faults/servers_lost": 1.0,
                "rollout/faults/servers_replaced": 1.0,
                "rollout/faults/servers_joined": 0.0,
                "rollout/faults/router_restarts": 0.0,
                "rollout/faults/requests_resent": 5.0,
            }
            assert set(recovery.take_metrics().values()) == {0.0}

    asyncio.run(body())


def test_servers_without_a_router_or_weights_serve_as_soon_as_they_have_started():
    async def body():
        fleet = FakeFleet(1)
        fleet.router = None
        recovery = EngineRecovery(
            NEVER, fleet, FakeClient([]), EngineMemory([]), needs_weight_sync=False, concurrency=0
        )
        await asyncio.sleep(0)
        fleet.engines[0].die()
        await until(lambda: len(recovery._events) == 2)
        assert recovery._events[1].startswith("SGLang server 0.1 (http") and recovery._events[1].endswith(
            " started and serves"
        )
        assert recovery.take_metrics()["rollout/faults/router_restarts"] == 0
        await recovery.close()

    asyncio.run(body())


def test_only_server_that_is_lost_in_an_update_starts_when_training_waits_for_it(monkeypatch):
    """Before, training may start ranks anew on its GPUs."""
    monkeypatch.setattr(recovery_module, "DEATH_GRACE_S", 0.0)

    async def body():
        async with recovering(1) as (recovery, fleet, *_):
            recovery._starts_paused = True  # by --colocate, in a weight update
            lost = fleet.engines[0]
            urls = [endpoint.url for endpoint in await recovery.begin_weight_update(False)]
            lost.die()
            await until(lambda: lost.done == ["killed"])
            await asyncio.sleep(0.05)
            assert fleet.engines[0] is lost
            assert await recovery.weight_update_failed(urls) == urls
            await asyncio.sleep(0.05)
            assert fleet.engines[0] is lost
            (new,) = await asyncio.wait_for(recovery.begin_weight_update(False), 10)
            assert fleet.engines[0].done == ["started"] and new == fleet.engines[0].endpoint

    asyncio.run(body())


def test_server_that_waits_for_a_node_delays_no_training():
    async def body():
        async with recovering(1) as (recovery, fleet, *_):
            node = asyncio.Event()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(FakeEngine, "placed", lambda _: node.wait())
                fleet.engines[0].die()
                await until(lambda: fleet.engines[0].life == 1)
                await asyncio.wait_for(recovery.release_memory(), 5)
                node.set()
                await asyncio.sleep(0.05)
                assert fleet.engines[0].done == []  # training has its GPUs
                await recovery.resume_memory(EVERYTHING)
                await until(lambda: fleet.engines[0].done == ["started"])

    asyncio.run(body())


def test_server_restarted_at_its_address_during_an_update_waits_for_weights():
    async def body():
        async with recovering() as (recovery, fleet, client, _):
            fleet.same_urls = True
            back, other = fleet.engines
            urls = [endpoint.url for endpoint in await recovery.begin_weight_update(False)]
            back.die()
            await until(lambda: recovery._slots[0].phase.value == "waiting")
            await recovery.end_weight_update(urls, "7")
            assert fleet.router.known == client.server_urls == [other.url]
            (waiting,) = (await recovery.status()).waiting
            assert (waiting.url, waiting.life) == (back.url, 1)

    asyncio.run(body())


def test_failed_weight_update_counts_a_server_restarted_at_its_address_as_failed(monkeypatch):
    monkeypatch.setattr(recovery_module, "DEATH_GRACE_S", 0.0)

    async def body():
        with StandIn() as well:
            async with recovering() as (recovery, fleet, _, _memory):
                fleet.same_urls = True
                fleet.engines[1].url = well.url
                urls = [endpoint.url for endpoint in await recovery.begin_weight_update(False)]
                fleet.engines[0].die()
                await until(lambda: recovery._slots[0].phase.value == "waiting")
                assert await recovery.weight_update_failed(urls) == [urls[0]]

    asyncio.run(body())


def test_failure_of_an_unhealthy_server_is_not_charged_to_its_replacement(monkeypatch):
    monkeypatch.setattr(recovery_module, "DEATH_GRACE_S", 0.0)

    async def body():
        async with recovering(1, HealthConfig(1000.0, 0.5, 0.0)) as (recovery, fleet, _, _memory):
            first = fleet.engines[0]
            first.url = f"http://127.0.0.1:{free_port()}"  # a free port
            await recovery.begin_weight_update(False)
            failed = asyncio.create_task(recovery.weight_update_failed([first.url]))
            await asyncio.sleep(0.1)  # the probe is in progress
            first.die()
            await until(lambda: recovery._slots[0].phase.value == "waiting")
            assert await failed == [first.url]
            recovery._mark_failed(recovery._slots[0], first, "failed a call")
            await asyncio.sleep(0.1)
            assert (fleet.engines[0].life, fleet.engines[0].done) == (1, ["started"])

    asyncio.run(body())


def test_failure_during_the_health_check_is_not_forgiven_by_the_rollout(monkeypatch):
    async def body():
        async with recovering(1) as (recovery, fleet, _, _memory):
            asked, answered = threading.Event(), threading.Event()

            def load(control: ServerControl) -> ServerLoad:
                asked.set()
                answered.wait(10)
                return ServerLoad(control.url, 0, 0, 0.0, prefilled=True)

            monkeypatch.setattr(ServerControl, "load", load)
            ends = asyncio.create_task(recovery.generation_ends())
            await until(asked.is_set)
            fleet.engines[0].die()
            await until(lambda: fleet.engines[0].life == 1)
            answered.set()
            await ends
            assert recovery._slots[0].losses == 1

    asyncio.run(body())


def test_replacement_has_weights_from_the_start_without_training():
    async def body():
        async with recovering(1, needs_weight_sync=False) as (_, fleet, client, _memory):
            fleet.engines[0].die()
            await until(lambda: client.server_urls == [fleet.engines[0].url] and fleet.engines[0].life == 1)
            await until(lambda: sorted(fleet.router.known) == client.server_urls)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("kind", "needs_weight_sync", "lost", "back"),
    [
        (Engine, True, "a replacement will be started", "started and waits for weights"),
        (ExternalEngine, True, "it is excluded until it is back", "is back and waits for weights"),
        (ExternalEngine, False, "it is excluded until it is back", "is back and serves"),
    ],
)
def test_only_servers_of_the_run_are_logged_as_replaced_and_started(monkeypatch, kind, needs_weight_sync, lost, back):
    monkeypatch.setattr(FakeEngine, "lost_message", kind.lost_message)
    monkeypatch.setattr(FakeEngine, "started_message", kind.started_message)

    async def body():
        async with recovering(1, needs_weight_sync=needs_weight_sync) as (recovery, fleet, _, _memory):
            fleet.engines[0].die()
            await until(lambda: len(recovery._events) == 2)
            assert recovery._events == [
                f"SGLang server 0.0 died with exit code -9 (log: log); {lost}",
                f"SGLang server 0.1 ({fleet.engines[0].url}) {back}",
            ]

    asyncio.run(body())


def test_weight_update_waits_for_a_server_when_none_is_left():
    async def body():
        async with recovering(1) as (recovery, fleet, _, _memory):
            fleet.engines[0].die()
            await recovery.events(0)
            assert [endpoint.url for endpoint in await recovery.begin_weight_update(False)] == [fleet.engines[0].url]
            assert fleet.engines[0].life == 1

    asyncio.run(body())


def test_repeatedly_dying_server_ends_the_run_with_its_last_log_lines():
    async def body():
        async with recovering(2) as (recovery, fleet, _, _memory):
            for life in range(MAX_LOSSES):
                await until(
                    lambda life=life: fleet.engines[1].life == life and recovery._slots[1].phase.value != "lost"
                )
                fleet.engines[1].die()
            message = await asyncio.wait_for(recovery.watch(), 10)
            assert f"SGLang server 1.{MAX_LOSSES - 1} died with exit code -9" in message
            assert "its last words" in message and f"lost {MAX_LOSSES} times in a row" in message

    asyncio.run(body())


def test_no_server_starts_while_training_holds_the_gpus():
    async def body():
        async with recovering(1) as (recovery, fleet, _, memory):
            memory.servers = []
            await recovery.release_memory()
            fleet.engines[0].die()
            await recovery.events(0)
            await asyncio.sleep(0.05)
            assert fleet.engines[0].life == 0
            await recovery.resume_memory(EVERYTHING[:1])
            await asyncio.sleep(0.05)
            assert fleet.engines[0].life == 0
            await recovery.resume_memory(EVERYTHING[1:])
            await until(lambda: recovery._slots[0].phase.value == "waiting")
            assert fleet.engines[0].life == 1

    asyncio.run(body())


def test_dead_router_is_restarted_with_the_serving_servers():
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
    """A server whose scheduler last logged `silent_s` ago, and which answers health checks or not."""

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

    def control(self, timeout_s: float) -> ServerControl:
        return ServerControl(self.url, timeout_s)

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
        (60.0, True, False, False),  # idle or paused: it logs nothing, but answers
        (60.0, False, False, True),  # hangs
        (60.0, False, True, False),  # waits in a broadcast
    ],
)
def test_server_is_healthy_while_its_scheduler_logs_or_answers(silent_s, answers, updating_weights, ill):
    with StandIn(silent_s, answers=answers, running=3) as server:
        found = probed(server, updating_weights=updating_weights)
    expected = "has had an unresponsive scheduler with 3 requests running and 0 queued for 0.2 s"
    assert found == (f"{expected} (--rollout-health-check-timeout)" if ill else None)


def test_unresponsive_or_stopped_server_is_unhealthy():
    url = f"http://127.0.0.1:{free_port()}"
    unreachable = types.SimpleNamespace(url=url, control=lambda timeout_s: ServerControl(url, timeout_s))
    assert probed(unreachable) == "has not answered for 0.2 s (--rollout-health-check-timeout)"
    with StandIn() as server:

        async def stopped():
            return ["sglang::scheduler (7)"]

        server.stopped = stopped
        assert "has had stopped processes, sglang::scheduler (7), for 0.2 s" in probed(server)


@pytest.mark.timeout(20)
def test_server_with_a_hung_actor_is_unhealthy():
    with StandIn() as server:

        async def stopped():
            await asyncio.Event().wait()

        server.stopped = stopped
        assert "has had an actor that does not respond for 0.2 s" in probed(server)


@pytest.mark.timeout(20)
def test_unread_log_and_hung_start_do_not_block_replacement(monkeypatch):
    monkeypatch.setattr(recovery_module, "LOG_TIMEOUT_S", 0.05)
    monkeypatch.setattr(recovery_module, "START_LIMIT_S", 0.05)

    async def hang(*_):
        await asyncio.Event().wait()

    async def body():
        async with recovering(1) as (recovery, fleet, _, _memory):
            fleet.engines[0].last_log_lines = hang
            replace_engine, starts = fleet.replace_engine, [hang]

            def replaced(index: int) -> FakeEngine:
                engine = replace_engine(index)
                if starts:
                    engine.start = starts.pop()
                return engine

            fleet.replace_engine = replaced
            recovery._mark_failed(recovery._slots[0], fleet.engines[0], "failed a call")
            await until(lambda: recovery._slots[0].phase.value == "waiting")
            assert fleet.engines[0].life == 2
            assert any("did not start: it was not ready after 0.05 s" in line for line in recovery._events)

    asyncio.run(body())


@pytest.mark.timeout(20)
def test_replacement_waits_for_a_node_as_long_as_it_takes(monkeypatch):
    monkeypatch.setattr(recovery_module, "START_LIMIT_S", 0.05)

    async def body():
        async with recovering(2) as (recovery, fleet, _, _memory):
            replace_engine, spare = fleet.replace_engine, asyncio.Event()

            def replaced(index: int) -> FakeEngine:
                engine = replace_engine(index)
                engine.placed = spare.wait
                return engine

            fleet.replace_engine = replaced
            fleet.engines[0].die()
            await until(lambda: fleet.engines[0].life == 1)
            await asyncio.sleep(0.2)
            assert (fleet.engines[0].life, fleet.engines[0].done) == (1, [])
            spare.set()
            await until(lambda: recovery._slots[0].phase.value == "waiting")
            assert fleet.engines[0].done == ["started"]

    asyncio.run(body())


def test_failures_separated_by_long_service_are_not_consecutive(monkeypatch):
    monkeypatch.setattr(recovery_module, "LONG_LIFE_S", 0.0)

    async def body():
        async with recovering(1, needs_weight_sync=False) as (recovery, fleet, client, _):
            for life in range(MAX_LOSSES + 1):
                await until(lambda life=life: fleet.engines[0].life == life and client.server_urls)
                fleet.engines[0].die()
                await until(lambda life=life: fleet.engines[0].life == life + 1)
            assert recovery._slots[0].losses == 1

    asyncio.run(body())


def test_training_that_waits_for_a_starting_server_logs_it():
    async def body():
        async with recovering(1) as (recovery, fleet, _, memory):
            memory.release = lambda: None
            replace_engine, started = fleet.replace_engine, asyncio.Event()

            def replaced(index: int) -> FakeEngine:
                engine = replace_engine(index)
                engine.start = lambda _: started.wait()
                return engine

            fleet.replace_engine = replaced
            fleet.engines[0].die()
            await until(lambda: fleet.engines[0].life == 1)
            release = asyncio.create_task(recovery.release_memory())
            line = (await asyncio.wait_for(recovery.events(1), 10)).lines[0]
            assert line == "training waits until SGLang server 0.1 has started, which still holds the GPU memory"
            assert not release.done()
            started.set()
            await asyncio.wait_for(release, 10)

    asyncio.run(body())


def test_router_start_is_retried_after_a_pause_and_its_port_is_logged(monkeypatch):
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


def test_router_failures_separated_by_long_uptime_are_not_consecutive(monkeypatch):
    monkeypatch.setattr(router_supervisor, "LONG_LIFE_S", 0.0)

    async def body():
        async with recovering(1) as (recovery, fleet, _, _memory):
            for restarts in range(1, MAX_LOSSES + 2):
                fleet.router.code = -9
                await until(lambda restarts=restarts: len(fleet.router.logs) == restarts)
                await until(lambda: fleet.router.known == [fleet.engines[0].url])

    asyncio.run(body())


def test_complete_rollout_resets_the_failure_count_of_a_server():
    async def body():
        with StandIn() as server:
            async with recovering(1) as (recovery, fleet, _, _memory):
                place = recovery._slots[0]
                place.losses, place.engine.url = MAX_LOSSES - 1, server.url
                await recovery.generation_ends()
                assert place.losses == 0

    asyncio.run(body())


class FakeElastic:
    """Places whose GPUs are free as soon as `free` is set; records the places that were given back."""

    def __init__(self, places: int) -> None:
        self.places = range(places)
        self.free = asyncio.Event()
        self.lives = 0
        self.given_back: list[tuple[int, bool]] = []
        self.wanted = None

    async def next_engine(self, place: int, wanted) -> FakeEngine:
        self.wanted = wanted
        await self.free.wait()
        self.free.clear()
        self.lives += 1
        return FakeEngine(5 + place, self.lives)

    def give_back(self, place: int, *, failed: bool = False) -> None:
        self.given_back.append((place, failed))

    def close(self) -> None:
        self.given_back.append((-1, False))


def test_engine_joins_with_weights_raises_the_concurrency_and_leaves_without_ending_the_run():
    async def body():
        elastic = FakeElastic(1)
        async with recovering(elastic=elastic) as (recovery, fleet, client, _):
            own = [engine.url for engine in fleet.engines]
            for _ in range(MAX_LOSSES + 1):  # so often its own server would end the run
                elastic.free.set()
                await until(lambda: len(fleet.engines) == 3 and "started" in fleet.engines[2].done)
                joined = fleet.engines[2]
                await until(lambda: recovery._slots[-1].phase.value == "waiting")
                assert client.server_urls == own
                assert await recovery.begin_weight_update(True) == [joined.endpoint]
                await recovery.end_weight_update([joined.url], "7")
                assert client.server_urls == [*own, joined.url] == fleet.router.known
                assert client.concurrency == 3 * 8
                joined.die()
                await until(lambda: len(fleet.engines) == 2)
                assert client.server_urls == own == fleet.router.known
                assert (client.concurrency, joined.done) == (2 * 8, ["started", "killed"])
            assert elastic.given_back == [(0, False)] * (MAX_LOSSES + 1)
            metrics = recovery.take_metrics()
            assert metrics["rollout/faults/servers_joined"] == metrics["rollout/faults/servers_lost"] == MAX_LOSSES + 1
            assert metrics["rollout/faults/servers_replaced"] == 0
        assert elastic.given_back[-1] == (-1, False)

    asyncio.run(body())


def test_no_engine_is_asked_to_join_while_a_server_of_the_run_is_lost():
    async def body():
        elastic = FakeElastic(1)
        async with recovering(elastic=elastic) as (recovery, fleet, _, _):
            await until(lambda: elastic.wanted is not None)
            assert elastic.wanted()
            recovery._starts_paused = True  # the replacement has to wait
            fleet.engines[0].die()
            await until(lambda: not elastic.wanted())
            recovery._starts_paused = False
            recovery._notify()
            await until(elastic.wanted)

    asyncio.run(body())


def test_joining_engine_that_does_not_start_is_given_back_as_failed():
    async def body():
        elastic = FakeElastic(1)

        async def fails(engine, timeout_s: float) -> None:
            raise ProcessStartError("no such model")

        async with recovering(elastic=elastic) as (recovery, fleet, client, _):
            original, FakeEngine.start = FakeEngine.start, fails
            try:
                elastic.free.set()
                await until(lambda: elastic.given_back == [(0, True)])
            finally:
                FakeEngine.start = original
            assert len(fleet.engines) == len(client.server_urls) == 2
            assert "SGLang server 5.1 did not start: no such model" in recovery._events[0]

    asyncio.run(body())
