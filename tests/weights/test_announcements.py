"""Announcements of buckets divided over two ranks: every server is told of every bucket, and failures are known."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from slimrl.engines.protocol import EngineError
from slimrl.weights.update.announcements import Announcements, default_store, divided_announcements
from slimrl.weights.update.engine_fanout import WeightSyncError, callers_of
from tests.megatron.launch import RankPool

SERVERS, BUCKETS = 5, 3


class Server:
    """Records the buckets that it is told of; rejects number `fails_at`."""

    def __init__(self, number: int, fails_at: int | None) -> None:
        self.url, self.told, self._fails_at = f"http://{number}", [], fails_at

    def update_weights_from_distributed(self, *, bucket: int) -> None:
        if bucket == self._fails_at:
            raise EngineError(f"{self.url} has no room for bucket {bucket}")
        self.told.append(bucket)


def rounds(rank: int, world_size: int, init_method: str, fails_at: int | None) -> list[object]:
    """Two rounds, of which server 3 of rank 1 rejects a bucket of the first; what this rank's servers were told."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    servers = [Server(number, fails_at if number == 3 else None) for number in range(SERVERS)]
    announcements = Announcements(default_store(), servers, rank, 2, timeout_s=20)
    found: list[object] = []
    for _ in range(2):
        try:
            with announcements.round():
                for bucket in range(BUCKETS) if rank == 0 else ():
                    announcements.publish({"bucket": bucket})
                    for server in announcements.own:
                        server.update_weights_from_distributed(bucket=bucket)
                if rank == 0 and fails_at is not None:
                    time.sleep(0.2)
                    announcements.check()  # as while it waits for a broadcast
        except WeightSyncError as error:
            found.append(str(error))
        dist.barrier()
        servers[3]._fails_at = None
    found.append({server.url: server.told for server in servers if server.told})
    dist.destroy_process_group()
    return found


def test_every_server_is_told_of_every_bucket_by_one_rank():
    with RankPool(2) as pool:
        ((zero,), (one,)) = pool.run(rounds, None)
    assert sorted(zero) == ["http://0", "http://2", "http://4"] and sorted(one) == ["http://1", "http://3"]
    assert all(told == [0, 1, 2] * 2 for told in (*zero.values(), *one.values()))


def test_bucket_that_the_server_of_another_rank_rejects_is_known_on_rank_zero_and_the_next_round_is_whole():
    with RankPool(2) as pool:
        ((failed, zero), (named, one)) = pool.run(rounds, 1)
    for error in (failed, named):
        assert error == "updating weights from a broadcast failed on http://3: http://3 has no room for bucket 1"
    assert one["http://3"] == [0, *range(BUCKETS)]
    assert one["http://1"] == [0, 1, *range(BUCKETS)]
    assert all(told == [0, 1, 2] * 2 for told in zero.values())


@pytest.mark.parametrize(
    ("servers", "ranks", "callers"), [(1, 8, 1), (32, 8, 1), (33, 8, 2), (512, 8, 8), (512, 64, 16), (4096, 4096, 128)]
)
def test_ranks_have_32_servers_each_as_long_as_there_are_ranks(servers, ranks, callers):
    assert callers_of(servers, ranks) == callers


def test_few_servers_are_told_by_rank_zero_alone():
    assert divided_announcements([], 0, 8, 10) is None
    assert divided_announcements([Server(0, None)] * 32, 0, 8, 10) is None
