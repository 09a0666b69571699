"""Cleanup of an external router and messages about external servers when a run fails or is interrupted."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
import types

import pytest

from slimrl.arguments import Arguments
from slimrl.cluster import rollout_manager_proxy
from slimrl.cluster.rollout_manager_proxy import RolloutManagerCleanup
from slimrl.engines.protocol import EngineUnavailableError
from slimrl.engines.sglang.adapters import COUNTS_PATH
from slimrl.engines.sglang.router import ExternalRouter
from tests.megatron.launch import free_port

OURS, ALSO_OURS, THEIRS = "http://10.0.0.1:1", "http://10.0.0.1:2", "http://10.0.0.2:1"


class JsonHandler(http.server.BaseHTTPRequestHandler):
    """Reads and answers JSON."""

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def log_message(self, *_): ...


@contextlib.contextmanager
def served(handler: type[JsonHandler]):
    """A server of its own thread; yields its port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextlib.contextmanager
def users_router(*urls: str):
    """A router with a list of servers; yields its port and the list."""
    known = list(urls)

    class Handler(JsonHandler):
        def do_GET(self):
            self.answer({"workers": [{"id": str(hash(url)), "url": url, "is_healthy": True} for url in known]})

        def do_POST(self):
            known.append(self.body()["url"])
            self.answer({})

        def do_DELETE(self):
            known[:] = [url for url in known if not self.path.endswith(f"/{hash(url)}")]
            self.answer({})

    with served(Handler) as port:
        yield port, known


def ended(port, registered, error=None, *, known=(), updating_weights=None, **flags):
    """Ends a run with `error` and returns the calls to the manager in order."""
    calls = []
    args = Arguments(sglang_router_ip=port and "127.0.0.1", sglang_router_port=port, **flags)

    def ask():
        calls.append("asked")
        return registered

    with contextlib.suppress(BaseException), RolloutManagerCleanup(args, ask, lambda: calls.append("killed")) as end:
        end.set_started(types.SimpleNamespace(updating_weights=updating_weights), known)
        if error is not None:
            raise error
    return calls


def test_external_router_keeps_the_servers_of_others():
    with users_router(THEIRS) as (port, known):
        router = ExternalRouter("127.0.0.1", port)
        router.add_worker(OURS)
        router.add_worker(OURS)  # reused: the previous one is removed first
        router.add_worker(ALSO_OURS)
        assert known == [THEIRS, OURS, ALSO_OURS]
        router.remove_worker(ALSO_OURS)
        router.remove_worker(THEIRS)
        assert known == [THEIRS, OURS] and router.added == {OURS}
        router.stop()
        assert known == [THEIRS] and router.added == set()


@pytest.mark.parametrize("error", [RuntimeError("a rank died"), KeyboardInterrupt()])
def test_failed_run_deregisters_its_servers_when_its_manager_is_dead(error):
    with users_router(OURS, THEIRS, ALSO_OURS) as (port, known):
        assert ended(port, [OURS, ALSO_OURS], error) == ["asked", "killed"]
        assert known == [THEIRS]


def test_servers_of_a_dead_manager_are_those_that_started():
    with users_router(OURS, THEIRS) as (port, known):
        ended(port, None, RuntimeError("the manager died"), known=[OURS])
        assert known == [THEIRS]


def test_clean_shutdown_or_own_router_needs_no_deregistration():
    with users_router(OURS) as (port, known):
        assert ended(port, [OURS]) == ["killed"] and known == [OURS]  # its manager has deregistered it
    assert ended(None, [OURS], RuntimeError("a rank died")) == ["killed"]


def test_unreachable_router_does_not_hide_the_cause_of_the_failure():
    args = Arguments(sglang_router_ip="127.0.0.1", sglang_router_port=free_port())
    with (
        pytest.raises(EngineUnavailableError, match="the cause"),
        RolloutManagerCleanup(args, lambda: [OURS], lambda: None),
    ):
        raise EngineUnavailableError("the cause")


def test_servers_that_may_have_partial_weights_are_named(caplog):
    flags = {"rollout_external_engine_addrs": ["10.0.0.1:1", "10.0.0.1:2"]}
    ended(None, None, KeyboardInterrupt(), updating_weights=7, **flags)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "during weight update 7: the servers 10.0.0.1:1, 10.0.0.1:2 of --rollout-external-engine-addrs" in line
    caplog.clear()
    ended(None, None, KeyboardInterrupt(), **flags)
    ended(None, None, KeyboardInterrupt(), updating_weights=7)
    assert not caplog.records


@contextlib.contextmanager
def server_of_adapters(*names: str):
    """A server that has adapters, which no request uses; yields its address and the names."""
    loaded = list(names)

    class Handler(JsonHandler):
        def do_GET(self):
            assert self.path == COUNTS_PATH
            self.answer({"adapters": dict.fromkeys(loaded, 0)})

        def do_POST(self):
            assert self.path == "/unload_lora_adapter"
            loaded.remove(self.body()["lora_name"])
            self.answer({"success": True})

    with served(Handler) as port:
        yield f"127.0.0.1:{port}", loaded


def test_adapters_are_removed_from_all_servers_at_once_and_for_a_limited_time(monkeypatch, caplog):
    monkeypatch.setattr(rollout_manager_proxy, "_REMOVAL_TIMEOUT_S", 1.0)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        hung = [f"127.0.0.1:{one.getsockname()[1]}" for one in silent]
        address, loaded = stack.enter_context(server_of_adapters("a.11111111@4", "a.11111111@5", "b.22222222@0"))
        flags = {"lora_rank": 4, "lora_name": "a", "adapter_owner": "11111111"}
        began = time.monotonic()
        calls = ended(None, None, KeyboardInterrupt(), rollout_external_engine_addrs=[*hung, address], **flags)
        assert calls == ["killed"]
        assert 1.0 <= time.monotonic() - began < 5.0  # a call to each waits for 30 s
        assert loaded == ["b.22222222@0"]
        (line,) = [record.getMessage() for record in caplog.records]
    urls = ", ".join(f"http://{one}" for one in hung)
    assert line == f"the adapters a.11111111@* may still be loaded in {urls}, which did not unload them within 1 s"


def test_manager_is_killed_after_its_last_dump_and_also_without_one(monkeypatch, caplog):
    calls = []
    waits = iter([([True], []), ([], [True]), ConnectionError("the cluster is gone")])

    def wait(refs, timeout):
        calls.append((refs, timeout >= 60))
        if isinstance(found := next(waits), Exception):
            raise found
        return found

    monkeypatch.setattr(rollout_manager_proxy.ray, "wait", wait)
    manager = types.SimpleNamespace(finish_dumps=lambda: "written", kill=lambda: calls.append("killed"))
    for _ in range(3):
        with contextlib.suppress(ConnectionError), RolloutManagerCleanup.of_manager(Arguments(), manager):
            pass
    assert calls == [(["written"], True), "killed"] * 3
    assert "the dump of the last rollout was not written" in caplog.text
