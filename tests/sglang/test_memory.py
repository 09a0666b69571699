"""The memory of the servers leaves and returns in order; what the servers would die of is never sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from slimrl.engines.protocol import EngineError, EngineRequestError, EngineUnavailableError
from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.engine_memory import EngineMemory, EngineMemoryError
from slimrl.engines.sglang.launch import ServerLaunch
from slimrl.engines.sglang.server import ServerProcess
from slimrl.engines.sglang.server_args import with_defaults
from slimrl.weights.update.topology import EngineEndpoint
from tests.megatron.launch import RankPool
from tests.megatron.tiny import save_qwen3
from tests.weights.test_real_servers import SERVER_OPTIONS, assert_serves, update_weights

EVERYTHING = ["weights", "kv_cache", "cuda_graph"]


class FakeServer:
    """Writes down what it is told, as SGLang's release and resume calls name it."""

    def __init__(self, busy: bool = False) -> None:
        self.told: list[tuple[str, list[str]]] = []
        self.busy = busy

    def flush_cache(self) -> None:
        if self.busy:
            raise EngineRequestError("http://busy", 400, "requests are running")
        self.told.append(("flush", []))

    def release_memory(self, tags: Sequence[str] | None) -> None:
        self.told.append(("release", list(tags or ())))

    def resume_memory(self, tags: Sequence[str] | None) -> None:
        self.told.append(("resume", list(tags or ())))


def test_every_server_is_emptied_after_its_last_request_and_filled_in_parts():
    servers = [FakeServer(), FakeServer()]
    memory = EngineMemory(servers)
    memory.release()
    memory.resume(["weights"])
    memory.resume(["kv_cache", "cuda_graph"])
    for server in servers:
        assert server.told == [
            ("flush", []),
            ("release", EVERYTHING),
            ("resume", ["weights"]),
            ("resume", ["kv_cache", "cuda_graph"]),
        ]
    assert memory.released == ()


def test_the_others_go_on_without_a_server_that_is_gone_where_somebody_replaces_it():
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
        assert server.told[-2:] == [("release", EVERYTHING), ("resume", EVERYTHING)]
    assert [name for name, _ in servers[1].told] == ["flush", "flush"]


def test_a_server_that_starts_later_is_brought_to_where_the_others_are():
    memory, late = EngineMemory([FakeServer()]), FakeServer()
    memory.adopt(late)
    assert late.told == []
    memory.release()
    memory.resume(["weights"])
    memory.adopt(late)
    assert late.told == [("flush", []), ("release", ["kv_cache", "cuda_graph"])]


def test_no_server_loses_memory_while_one_still_works():
    servers = [FakeServer(), FakeServer(busy=True)]
    memory = EngineMemory(servers)
    with pytest.raises(EngineError, match="http://busy"):
        memory.release()
    assert memory.released == ()
    assert all(name != "release" for server in servers for name, _ in server.told)


def test_calls_that_a_server_would_die_of_are_refused_and_not_sent():
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
    assert [name for name, _ in server.told] == ["flush", "release", "resume"]


def test_generating_needs_everything_and_a_weight_update_the_weights():
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


def test_without_a_gpu_the_allocator_that_lets_memory_go_is_not_asked_for():
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
def test_a_server_generates_the_same_after_its_memory_was_away_and_other_weights_came_between(
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
            assert_serves(url, folder, version)  # log-probabilities as transformers computes them
            answers.append(greedy(url))
    assert answers[0] != before and answers[1] == before
    assert ServerControl(url).healthy()
