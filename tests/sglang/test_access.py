"""The key of a run: which processes receive it, which send it, and where it must not appear."""

import asyncio
import dataclasses
import http.server
import json
import pickle
import threading
from pathlib import Path

import pytest

from slimrl.arguments import Arguments
from slimrl.arguments.redact import HIDDEN
from slimrl.cluster.launch import key_of, with_key
from slimrl.engines import http as engine_http
from slimrl.engines.http import call, is_reachable
from slimrl.engines.protocol import EngineRequestError
from slimrl.engines.server_protocol import ServerLaunch
from slimrl.engines.sglang import router, server
from slimrl.engines.sglang.client import RouterClient
from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.external_server_check import inspect
from slimrl.engines.sglang.router import ExternalRouter
from slimrl.rollout.rm_hub.remote import RemoteRefused, RemoteReward

SECRET = "k3y-of-the-run"


class Locked(http.server.BaseHTTPRequestHandler):
    """Answers 401 to requests without the key; records the requests."""

    seen: list

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.seen.append((self.command, self.path, body))
        allowed = self.headers.get("Authorization") == f"Bearer {SECRET}"
        content = json.dumps({"workers": [], "loads": [], "timestamp": "2026-01-01T00:00:00+00:00"}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def locked():
    handler = type("Handler", (Locked,), {"seen": []})
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listener.server_port}", handler.seen
    listener.shutdown()
    listener.server_close()


class Recorded:
    """Replaces the process that would be started."""

    def __init__(self, command, *, environment, **_: object) -> None:
        self.command, self.environment = command, environment

    def start(self) -> None:
        pass

    def stop(self, timeout_s: float = 0.0) -> None:
        pass


def test_run_creates_its_own_key_unless_the_user_gives_one():
    first, second = (key_of(with_key(Arguments())) for _ in range(2))
    assert first != second
    assert len(first) >= 40
    given = with_key(Arguments(sglang_options={"api_key": SECRET, "dtype": "auto"}))
    assert given.sglang_options == {"api_key": SECRET, "dtype": "auto"}
    assert given.rm_server_options == {"api_key": SECRET}


def test_external_reward_model_does_not_receive_the_run_key():
    assert with_key(Arguments(rm_url="http://elsewhere:1")).rm_server_options == {}


def test_key_is_hidden_in_printed_values():
    args = with_key(Arguments(sglang_options={"api_key": SECRET}))
    for shown in (
        repr(args),
        str(args.sglang_options),
        f"{dataclasses.asdict(args)}",
        repr(pickle.loads(_pickled(args))),
    ):
        assert SECRET not in shown
        assert HIDDEN in shown
    assert engine_http.HIDDEN_KEY == HIDDEN
    assert json.dumps({"k": key_of(args)}) == f'{{"k": "{SECRET}"}}'  # as SGLang returns it to authorized clients


def _pickled(args: Arguments) -> bytes:
    return pickle.dumps(args.sglang_options)


def test_child_removes_the_key_from_its_environment():
    environment = {"HOME": "/h", **engine_http.key_environment(engine_http.Key(SECRET))}
    assert engine_http.pop_key_from_environment(environment) == SECRET
    assert environment == {"HOME": "/h"}
    assert engine_http.pop_key_from_environment(environment) is None
    assert engine_http.key_environment(None) == {}


@pytest.mark.parametrize("cuda", [False, True])
def test_server_gets_the_key_outside_its_command_line(monkeypatch, tmp_path, cuda):
    monkeypatch.setattr(server, "ManagedProcess", Recorded)
    options = {"api_key": SECRET, "host": "0.0.0.0"}
    launched = server.ServerProcess(
        "/model", log_path=tmp_path / "log", options=options, launch=ServerLaunch(cuda), key=SECRET
    )
    launched.start()
    process = launched._process
    launched.stop()
    assert process.environment[engine_http.KEY_VARIABLE] == SECRET
    assert SECRET not in " ".join(process.command)
    assert [word for word in process.command if word.startswith("--host")] == ["--host=0.0.0.0"]


def test_router_gets_the_key_outside_its_command_line(monkeypatch, tmp_path):
    monkeypatch.setattr(router, "ManagedProcess", Recorded)
    launched = router.RouterProcess(log_path=tmp_path / "log", key=SECRET)
    launched.start()
    process = launched._process
    launched.stop()
    assert process.environment[engine_http.KEY_VARIABLE] == SECRET
    assert SECRET not in " ".join(process.command)
    assert {"--host=127.0.0.1", "--prometheus-host=127.0.0.1"} <= set(process.command)


def test_every_call_sends_the_key(locked):
    url, seen = locked
    with pytest.raises(EngineRequestError, match="401"):
        call("GET", f"{url}/x", timeout_s=5)
    assert call("GET", f"{url}/x", timeout_s=5, key=SECRET)["workers"] == []
    assert not is_reachable(f"{url}/x")
    assert is_reachable(f"{url}/x", key=SECRET)
    with pytest.raises(EngineRequestError, match="401"):
        ServerControl(url).flush_cache(wait_s=0)
    control = ServerControl(url, key=SECRET)
    control.flush_cache()
    control.server_info()
    control.destroy_weights_update_group("g")
    assert ServerControl(url, 5).load().running is None
    assert ServerControl(url, 5, SECRET).load().running == 0
    with pytest.raises(Exception, match="requires another key.*--sglang-api-key"):
        inspect(url.removeprefix("http://"), "/model")
    assert ("POST", "/destroy_weights_update_group", b'{"group_name": "g"}') in seen


def test_router_gets_the_key_of_the_servers(locked):
    url, seen = locked
    host, port = url.removeprefix("http://").split(":")
    ExternalRouter(host, int(port), key=SECRET).add_worker("http://10.0.0.1:1")
    bodies = [json.loads(body) for method, path, body in seen if (method, path) == ("POST", "/workers")]
    assert bodies == [{"url": "http://10.0.0.1:1", "api_key": SECRET}]


def test_server_log_does_not_contain_the_key():
    """SGLang logs its whole configuration as a dictionary."""
    from slimrl.engines.sglang.versions import read_server_flags

    assert any(declared.dest == engine_http.KEY_OPTION for declared in read_server_flags())  # still has that name
    assert SECRET not in f"server_args={ ({engine_http.KEY_OPTION: engine_http.Key(SECRET), 'log': Path('x')}) }"


def test_reward_service_gets_its_key(locked):
    url, _ = locked

    async def ask(key: str | None) -> bytes:
        service = RemoteReward(url, key=key)
        try:
            return await service.ask(b"{}")
        finally:
            await service._session.close()

    with pytest.raises(RemoteRefused, match="401"):
        asyncio.run(ask(None))
    assert b"workers" in asyncio.run(ask(SECRET))


def test_token_requests_send_the_key():
    client = RouterClient("http://router", [], concurrency=1, request_timeout_s=1, key=SECRET)

    async def headers() -> str | None:
        async with client:
            return client._connections.headers.get("Authorization")

    assert asyncio.run(headers()) == f"Bearer {SECRET}"
