"""Process groups of some ranks are created without the others, and no communicator before its first use.

If the default group is bound to a device, torch derives every later group from its communicator, collectively over all
ranks; only a GPU can be bound. So the gloo groups show that slimrl's groups need no other ranks, and the last test
shows that on a GPU nothing is bound.
"""

from __future__ import annotations

import datetime
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slimrl.arguments import Arguments
from slimrl.megatron import parallel
from slimrl.platform import launch_env
from tests.megatron import tiny
from tests.megatron.launch import run_ranks

SUBSETS = [members for size in (2, 3) for members in itertools.combinations(range(4), size)]
TIMEOUT = datetime.timedelta(seconds=60)


def collectives_so_far() -> int:
    """Number of collectives of the default group on this rank."""
    return dist.group.WORLD._get_backend(torch.device("cpu"))._get_sequence_number_for_group()


def make_partial_groups(rank: int, world_size: int, init_method: str, args: Arguments) -> dict[str, Any]:
    """Groups of every subset in several orders, each used by its members only, concurrently."""
    state = parallel.initialize(args, rank=rank, world_size=world_size, init_method=init_method)
    default = dist.group.WORLD
    found = {"bound": default.bound_device_id, "before": collectives_so_far(), "sums": []}
    orders = (SUBSETS, SUBSETS[::-1], sorted(SUBSETS, key=lambda members: members[-1:] + members))
    for order in orders:
        for members in order:
            group = dist.new_group(members, backend="gloo", timeout=TIMEOUT)
            if rank in members:
                value = torch.tensor([2.0**rank])
                dist.all_reduce(value, group=group)
                found["sums"].append((members, value.item()))
    found["after"] = collectives_so_far()
    found["used"] = state.tp_group._get_backend(torch.device("cpu"))._get_sequence_number_for_group()
    parallel.shutdown()
    return found


@pytest.mark.slow
def test_partial_groups_in_any_order_need_no_collective_of_others():
    args = tiny.tiny_args(tensor_model_parallel_size=2)
    results = run_ranks(make_partial_groups, 4, args)
    for rank, found in enumerate(results):
        assert found["bound"] is None
        assert found["before"] == found["after"]  # the default group has run no collective for them
        assert found["used"] == 0  # nor has the tensor-parallel group run one before its first use
        assert len(found["sums"]) == 3 * sum(rank in members for members in SUBSETS)
        assert all(value == sum(2.0**member for member in members) for members, value in found["sums"])


def join_beside_training(rank: int, world_size: int, init_method: str, args: Arguments, port_file: str) -> float:
    """Ranks 0 and 1 train; rank 0 alone joins a group with an outsider, which "rank" 2 plays, while 1 continues."""
    from slimrl.weights.update.transport_distributed import join_group

    place = Path(port_file)
    value = torch.zeros(3)
    if rank == 2:
        while not place.is_file():
            time.sleep(0.05)
        store = dist.TCPStore("127.0.0.1", int(place.read_text()), 2, is_master=False, timeout=TIMEOUT)
        group = join_group(store, "gloo", "weights", rank=1, world_size=2, timeout=TIMEOUT)
        group.broadcast([value], dist.BroadcastOptions()).wait()
        return value.sum().item()
    parallel.initialize(args, rank=rank, world_size=2, init_method=init_method)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        place.with_suffix(".new").write_text(str(store.port))
        place.with_suffix(".new").rename(place)
        before = collectives_so_far()
        group = join_group(store, "gloo", "weights", rank=0, world_size=2, timeout=TIMEOUT)
        value += 5
        group.broadcast([value], dist.BroadcastOptions()).wait()
        assert collectives_so_far() == before
    together = torch.ones(1)
    dist.all_reduce(together)  # rank 1 waits here, in the first collective of training
    parallel.shutdown()
    return together.item()


@pytest.mark.slow
def test_one_rank_joins_a_group_with_servers_while_the_others_work(tmp_path):
    assert run_ranks(join_beside_training, 3, tiny.tiny_args(), str(tmp_path / "port")) == [2.0, 2.0, 15.0]


def test_default_group_on_gpus_is_bound_to_no_device(monkeypatch):
    asked: dict[str, Any] = {}

    class OpenedError(Exception):
        pass

    def record(*_: Any, **options: Any) -> None:
        asked.update(options)
        raise OpenedError

    monkeypatch.setattr(parallel, "bind_local_device", lambda rank: torch.device("cuda", rank))
    monkeypatch.setattr(parallel, "this_machine", lambda: launch_env.Machine(cuda=True, gpus=1))
    monkeypatch.setattr(dist, "init_process_group", record)
    with pytest.raises(OpenedError):
        parallel.initialize(tiny.tiny_args(), rank=0, world_size=1, init_method="file:///nowhere")
    assert asked["backend"] == "nccl" and asked["device_id"] is None


def deterministic_rank(rank: int, world_size: int, init_method: str, args: Arguments) -> tuple[bool, bool, str, bool]:
    """Whether torch is deterministic before and after a rank starts; the error of a nondeterministic operation; whether
    new memory is filled, as torch does by default in that mode.
    """
    before = torch.are_deterministic_algorithms_enabled()
    parallel.initialize(args, rank=rank, world_size=world_size, init_method=init_method)
    after = torch.are_deterministic_algorithms_enabled()
    try:
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        said = ""
    except RuntimeError as error:
        said = str(error)
    parallel.shutdown()
    return before, after, said, torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.slow
def test_deterministic_mode_makes_operations_deterministic_or_rejected():
    on = run_ranks(deterministic_rank, 1, tiny.tiny_args(deterministic_mode=True))
    assert on[0][:2] == (False, True)
    assert "does not have a deterministic implementation" in on[0][2]
    assert on[0][3] is False
    assert run_ranks(deterministic_rank, 1, tiny.tiny_args()) == [(False, False, "", True)]
