"""Differences between SGLang releases: how each is recognized, and correct results for all of them."""

from __future__ import annotations

import base64
import functools
import io
import pickle
import sys
import types

import pytest
import torch
import torch.distributed as dist

from slimrl.engines.protocol import EngineError, EngineRequestError
from slimrl.engines.sglang import control, versions
from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.versions import UnknownEngineError, allow_shm_unpickling, has_per_token_versions, module_with
from slimrl.weights.update.buckets import iter_buckets
from slimrl.weights.update.shared_memory import HostSharedBuffer
from slimrl.weights.update.transport_tensor import serialize, serialize_named


@pytest.mark.parametrize(
    ("version", "tells"),
    [("0.5.17", False), ("0.5.18", False), ("0.5.19", True), ("0.5.20.post1", True), ("0.10.0", True), ("main", True)],
)
def test_releases_that_report_the_weight_version_per_token(version, tells):
    assert has_per_token_versions(version) is tells


def test_name_is_found_at_the_path_of_its_release(monkeypatch):
    older = types.ModuleType("older_engine")
    older.wanted = "here"
    newer = types.ModuleType("newer_engine")  # exists, without the name
    monkeypatch.setitem(sys.modules, "older_engine", older)
    monkeypatch.setitem(sys.modules, "newer_engine", newer)
    places = {"wanted": ("absent_engine", "newer_engine", "older_engine"), "unknown": ("newer_engine",)}
    monkeypatch.setattr(versions, "PLACES", places)
    assert module_with("wanted") is older
    with pytest.raises(
        UnknownEngineError, match=r"unknown in none of newer_engine: install a version of docs/versions"
    ):
        module_with("unknown")


class ListedNames(pickle.Unpickler):
    """An unpickler like that of SGLang 0.5.21 and later, with an allow list."""

    ALLOWED_GLOBALS = {("functools", "partial"), ("torch", "uint8"), ("types", "SimpleNamespace"), ("torch", "float32")}

    def find_class(self, module, name):
        if (module, name) not in self.ALLOWED_GLOBALS:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name})")
        return super().find_class(module, name)


@pytest.fixture
def listed():
    """A new class for each test, because it is changed in place."""
    return type("Listed", (ListedNames,), {"ALLOWED_GLOBALS": ListedNames.ALLOWED_GLOBALS})


def loaded(unpickler: type, payload: bytes):
    return unpickler(io.BytesIO(payload)).load()


@pytest.fixture
def one_rank_world(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
def test_host_memory_references_pass_an_allow_list(listed, one_rank_world, ranks):
    buffer = HostSharedBuffer()
    (bucket,) = iter_buckets(iter([("w", torch.full((4,), 3.0))]), 1024, buffer)
    payload = base64.b64decode(serialize(bucket, [buffer.reference()] * ranks))
    with pytest.raises(RuntimeError, match="Blocked unsafe global"):
        loaded(listed, payload)
    allow_shm_unpickling(listed)
    flat = loaded(listed, payload)["flattened_tensor"]
    assert flat[:16].view(torch.float32).tolist() == [3.0] * 4
    ((name, tensor),) = loaded(listed, base64.b64decode(serialize_named(bucket, buffer.reference())))
    assert (name, tensor.tolist()) == ("w", [3.0] * 4)
    buffer.close()


def test_no_other_name_passes_the_allow_list(listed):
    allow_shm_unpickling(listed)
    for blocked in (torch.from_numpy, functools.reduce, pickle.loads):
        with pytest.raises(RuntimeError, match="may not access|Blocked unsafe global"):
            loaded(listed, pickle.dumps(blocked))
    with pytest.raises(RuntimeError, match="may not access the attribute 'system'"):
        loaded(listed, b"cbuiltins\ngetattr\n(V\nVsystem\ntR.")


def test_unpickler_without_an_allow_list_is_not_patched():
    older = type("Older", (pickle.Unpickler,), {})
    allow_shm_unpickling(older)
    assert "find_class" not in vars(older)


class Server:
    """Answers `call` like a server of a release, with or without weight-update sessions."""

    def __init__(self, *, sessions: bool, is_open: bool = False, version: str = "0.5.23") -> None:
        self.sessions, self.is_open, self.version = sessions, is_open, version
        self.calls: list[str] = []

    def __call__(self, method, url, body=None, *, timeout_s, key):
        path = url.removeprefix("http://server")
        self.calls.append(path)
        if path.endswith("_weight_update"):
            if not self.sessions:
                raise EngineRequestError(url, 404, "Not Found")
            if (path == "/begin_weight_update") is self.is_open:
                raise EngineRequestError(url, 400, "a weight-update session is already open")
            self.is_open = not self.is_open
        if path == "/server_info":
            return {"version": self.version, "disable_radix_cache": True}
        checksums = {"model.norm.weight": "1", "draft.model.norm.weight": "2"}
        ranks = [{"checksums": checksums, "parallelism_info": [{"tp_rank": rank}]} for rank in (1, 0)]
        return {"paths": {}, "ranks": ranks}


@pytest.fixture
def control_of(monkeypatch):
    def connect(server: Server) -> ServerControl:
        monkeypatch.setattr(control, "call", server)
        return ServerControl("http://server")

    return connect


def test_update_after_a_failed_one_reopens_the_session(control_of):
    server = Server(sessions=True, is_open=True)
    control_of(server).begin_weight_update()
    assert server.is_open
    assert server.calls[-3:] == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]


def test_server_without_sessions_is_asked_for_one_once(control_of):
    server = Server(sessions=False)
    connected = control_of(server)
    for version in ("1", "2"):
        connected.begin_weight_update()
        connected.commit_weight_update(version)
    assert [path for path in server.calls if path.endswith("n_weight_update")] == ["/begin_weight_update"]
    assert "/end_weight_update" not in server.calls
    assert server.calls.count("/flush_cache") == 4 and server.calls.count("/update_weight_version") == 2


@pytest.mark.parametrize("sessions", [True, False])
def test_update_is_a_session_when_the_server_supports_them(control_of, sessions):
    server = Server(sessions=sessions)
    with control_of(server).weight_update("1"):
        assert server.is_open is sessions
    assert not server.is_open


def test_requests_are_not_retracted_when_tokens_would_get_the_wrong_version(control_of):
    with pytest.raises(EngineError, match="runs SGLang 0.5.18.*install sglang 0.5.19 or later"):
        control_of(Server(sessions=False, version="0.5.18")).begin_weight_update("retract")


def test_checksums_cover_the_model_without_its_draft_models(control_of):
    ranks = control_of(Server(sessions=True)).weights_checksum()
    assert [rank["parallelism_info"]["tp_rank"] for rank in ranks] == [0, 1]
    assert [rank["checksums"] for rank in ranks] == [{"model.norm.weight": "1"}] * 2
