"""Servers are offloaded and onloaded in order; calls that would crash a server are never sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from slimrl.engines.protocol import EngineError, EngineRequestError, EngineUnavailableError
from slimrl.engines.server_protocol import EngineMemory, EngineMemoryError, ServerLaunch
from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.server import ServerProcess
from slimrl.engines.sglang.server_args import with_defaults
from slimrl.weights.update.topology import EngineEndpoint
from tests.megatron.launch import RankPool
from tests.megatron.tiny import save_qwen3
from tests.weights.test_real_servers import SERVER_OPTIONS, assert_serves, update_weights

EVERYTHING = ["weights", "kv_cache", "cuda_graph"]


class FakeServer:
    """Records the calls, by the names of SGLang's release and resume calls."""

    def __init__(self, busy: bool = False) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.busy = busy

    def flush_cache(self) -> None:
        if self.busy:
            raise EngineRequestError("http://busy", 400, "requests are running")
        self.calls.append(("flush", []))

    def release_memory(self, tags: Sequence[str] | None) -> None:
        self.calls.append(("release", list(tags or ())))

    def resume_memory(self, tags: Sequence[str] | None) -> None:
        self.calls.append(("resume", list(tags or ())))


def test_each_server_is_offloaded_after_its_last_request_and_onloaded_in_parts():
    servers = [FakeServer(), FakeServer()]
    memory = EngineMemory(servers)
    memory.release()
    memory.resume(["weights"])
    memory.resume(["kv_cache", "cuda_graph"])
    for server in servers:
        assert server.calls == [
            ("flush", []),
            ("release", EVERYTHING),
            ("resume", ["weights"]),
            ("resume", ["kv_cache", "cuda_graph"]),
        ]
    assert memory.released == ()


def test_other_servers_continue_without_a_lost_one_when_it_will_be_replaced():
    class Gone(FakeServer):
        def release_memory(self, tags):
            raise EngineUnavailableError("http://gone cannot be reached")

    servers, lost = [FakeServer(), Gone(), FakeServer()], []
    with pytest.raises(EngineUnavailableError):
        EngineMemory(servers).release()
    memory = EngineMemory(servers, lambda server, error: lost.append((server, str(error))))
    memory.release()
    memory.resume()
    assert lost == [(servers[1], "http://gone cannot be reached")]
    for server in (servers[0], servers[2]):
        assert server.calls[-2:] == [("release", EVERYTHING), ("resume", EVERYTHING)]
    assert [name for name, _ in servers[1].calls] == ["flush", "flush"]


def test_server_that_starts_later_gets_the_memory_state_of_the_others():
    memory, late = EngineMemory([FakeServer()]), FakeServer()
    memory.adopt(late)
    assert late.calls == []
    memory.release()
    memory.resume(["weights"])
    memory.adopt(late)
    assert late.calls == [("flush", []), ("release", ["kv_cache", "cuda_graph"])]


def test_no_server_is_offloaded_while_one_still_works():
    servers = [FakeServer(), FakeServer(busy=True)]
    memory = EngineMemory(servers)
    with pytest.raises(EngineError, match="http://busy"):
        memory.release()
    assert memory.released == ()
    assert all(name != "release" for server in servers for name, _ in server.calls)


def test_calls_that_would_crash_a_server_are_rejected_unsent():
    server = FakeServer()
    memory = EngineMemory([server])
    with pytest.raises(
        EngineMemoryError, match="cannot resume weights, kv cache and cuda graph: that memory is not rel"
    ):
        memory.resume()
    memory.release()
    with pytest.raises(EngineMemoryError, match="cannot release their memory: weights, kv cache and cuda graph is rel"):
        memory.release()
    memory.resume(["weights"])
    with pytest.raises(EngineMemoryError, match="cannot resume weights: that memory is not released"):
        memory.resume(["weights"])
    assert [name for name, _ in server.calls] == ["flush", "release", "resume"]


def test_generation_needs_all_memory_and_a_weight_update_the_weights():
    memory = EngineMemory([FakeServer()])
    memory.require("generating")
    memory.release()
    with pytest.raises(
        EngineMemoryError, match="^generating needs the engines' weights, kv cache and cuda graph, which"
    ):
        memory.require("generating")
    memory.resume(["weights"])
    memory.require("a weight update", ["weights"])
    with pytest.raises(EngineMemoryError, match="^generating needs the engines' kv cache and cuda graph, which is rel"):
        memory.require("generating")


def test_memory_saver_is_not_enabled_without_a_gpu():
    words = with_defaults(["--tp-size=2", "--enable-memory-saver", "--log-level=info"])
    assert [word for word in words if "memory-saver" in word] == []
    assert "--tp-size=2" in words and words[-1] == "--log-level=info"


# -- real servers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape; the server starts with the first."""
    root = tmp_path_factory.mktemp("models")
    return [save_qwen3(root / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def url(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = ServerProcess(
        folders[0],
        log_path=tmp_path_factory.mktemp("log") / "log",
        options=SERVER_OPTIONS,
        launch=ServerLaunch(cuda=False, memory_saver=True),
    )
    try:
        server.start()
        server.wait_ready(120)
        yield server.url
    finally:
        server.stop()


def greedy(url: str) -> list[int]:
    from slimrl.engines.http import call

    sampling = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    return call("POST", f"{url}/generate", {"input_ids": [5, 17, 90, 3], "sampling_params": sampling}, timeout_s=60)[
        "output_ids"
    ]


@pytest.mark.slow
def test_server_generates_the_same_after_offload_and_an_intermediate_update(
    url: str, folders: list[Path], tmp_path: Path
):
    memory = EngineMemory([ServerControl(url, timeout_s=60)])
    engines = [EngineEndpoint(url, [0])]
    before = greedy(url)
    answers = []
    with RankPool(1) as pool:
        for version, folder in (("1", folders[1]), ("2", folders[0])):
            memory.release()
            memory.resume(["weights"])
            update_weights(pool, 1, folder, engines, "colocated", version, tmp_path)
            memory.resume(["kv_cache", "cuda_graph"])
            assert_serves(url, folder, version)  # log-probabilities match transformers
            answers.append(greedy(url))
    assert answers[0] != before and answers[1] == before
    assert ServerControl(url).healthy()
