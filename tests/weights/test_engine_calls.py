"""With many servers every trainer rank calls its share of them, and all ranks know of every failure."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path

import pytest
import torch

from slimrl.observability.tracer import Timeline
from slimrl.platform.collective_errors import RankSync
from slimrl.weights.update.engine_fanout import EngineCalls, WeightSyncError
from slimrl.weights.update.transport_disk import Delivery, DiskTransport, EveryRankWaits
from tests.megatron.launch import RankPool
from tests.weights.servers import RecordingServer

pytestmark = pytest.mark.slow
UPDATE = ["begin", "commit 7", "continue"]


class Stuck(RecordingServer):
    """Does not resume."""

    def continue_(self) -> None:
        raise RuntimeError("stuck")


def update(
    rank: int, world_size: int, init_method: str, servers: int, of_one_rank: int, fault: str | None
) -> tuple[list[list[str]], str, list[str]]:
    """The calls of this rank to each server, the failure, and the states that every rank knows."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    try:
        made = [RecordingServer(f"http://{number}") for number in range(servers)]
        if fault == "resume":
            made[3] = Stuck("http://3")
        elif fault == "version":
            made[3] = RecordingServer("http://3", reports="6")
        calls = EngineCalls(made, [1], rank, RankSync(rank, WeightSyncError), Timeline.off(), of_one_rank)
        calls.begin("abort")
        try:
            failed = calls.commit_and_resume("7", "abort")
        except WeightSyncError as error:
            failed = str(error), error.final
        states = [f"{state.url} {state.version}" for state in calls.states()]
        return [server.calls for server in made], "" if failed is None else failed[0], states
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("of_one_rank", [2, 5, 6])
def test_every_server_is_called_by_one_rank(of_one_rank: int):
    (first, _, known), (second, _, also) = RankPool(2).run(update, 6, of_one_rank, None)
    whole = [[*UPDATE, "settle"] if number == 1 else UPDATE for number in range(6)]
    assert [one + other for one, other in zip(first, second, strict=True)] == whole
    assert all(second) is False and any(second) is (of_one_rank < 6)
    assert sorted(known) == sorted(also) == [f"http://{number} 7" for number in range(6)]


def deliver(
    rank: int, world_size: int, init_method: str, servers: int, of_one_rank: int, folder: Path
) -> tuple[list[int], bool]:
    """The servers that this rank made load the files, and whether these are still there afterwards."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    try:
        made = [LoadsFolder(f"http://{number}") for number in range(servers)]
        ranks = RankSync(rank, WeightSyncError)
        calls = EngineCalls(made, [], rank, ranks, Timeline.off(), of_one_rank)
        transport = DiskTransport(made, folder, torch.device("cpu")) if rank == 0 else None
        delivery = Delivery(ranks, calls, transport, None)
        delivery.begin("7")
        if transport is not None:
            transport.folder.mkdir(parents=True)
        delivery.finish()
        return [number for number, server in enumerate(made) if server.loaded], any(folder.rglob("weight_v*"))
    finally:
        dist.destroy_process_group()


class LoadsFolder(RecordingServer):
    """Remembers whether the folder was there."""

    loaded = False

    def update_weights_from_disk(self, model_path: str, *, weight_version: str | None, flush_cache: bool) -> None:
        self.loaded = Path(model_path).is_dir()


@pytest.mark.parametrize(("of_one_rank", "first", "second"), [(6, [0, 1, 2, 3, 4, 5], []), (2, [0, 2, 4], [1, 3, 5])])
def test_files_are_loaded_by_the_calls_of_every_rank_and_removed(of_one_rank, first, second, tmp_path):
    found = RankPool(2).run(deliver, 6, of_one_rank, tmp_path)
    assert found == [(first, False), (second, False)]


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("resume", "every server has weight version '7', and not all resume: continuing with new weights failed on"),
        ("version", "after the update to weight version '7', http://3 reports '6': these servers do not have the new"),
    ],
)
def test_failure_of_a_server_is_known_to_every_rank(fault: str, failure: str):
    for calls, found, _ in RankPool(2).run(update, 6, 2, fault):
        assert found.startswith(failure)
        assert all("continue" not in of_server for of_server in calls) or fault == "resume"


class RecordsLoads(RecordingServer):
    """Records the calls that load weights."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.loads: list[object] = []

    def update_weights_from_disk(self, model_path: str, *, weight_version: str | None, flush_cache: bool) -> None:
        self.loads.append(model_path)

    def update_weights_from_tensor(
        self, serialized: list[str], *, load_format: str | None, weight_version: str | None, flush_cache: bool
    ) -> None:
        self.loads.append([pickle.loads(base64.b64decode(one)) for one in serialized])


def test_folder_is_loaded_once_every_rank_of_a_server_has_ended_a_later_update():
    servers = [RecordsLoads("http://0"), RecordsLoads("http://1")]
    EveryRankWaits.of(servers, [1, 2])(servers, "/weights")
    assert [server.loads for server in servers] == [["/weights"], ["/weights", [[], []]]]
