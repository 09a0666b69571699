"""Offloading on a GPU: memory really leaves the device, and NCCL and servers work afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slimrl.arguments import Arguments
from slimrl.engines.server_protocol import EngineMemory, ServerLaunch
from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.server import ServerProcess
from slimrl.megatron.offload import TrainingMemory
from slimrl.megatron.parallel import Communicators
from slimrl.platform.launch_env import SUSPENDS_SINCE
from tests.gpu.conftest import needs
from tests.megatron import ranks, tiny
from tests.megatron.launch import RankPool
from tests.megatron.test_offload import train
from tests.sglang.test_memory import greedy

pytestmark = [pytest.mark.slow, needs()]
MIB = 1024**2


def test_offloaded_memory_is_freed_and_its_host_copy_reused():
    device = torch.device("cuda", 0)
    weights = torch.randn(40 * MIB, device=device)
    state = torch.randn(20 * MIB, device=device)
    before = weights.cpu(), state.cpu()
    memory = TrainingMemory(
        lambda: {"weights": [weights], "gradients": [torch.empty(0)], "optimizer": [state]}, device, Communicators([])
    )
    resident = torch.cuda.memory_reserved()
    pinned = []
    for _ in range(2):
        assert memory.sleep() == {"weights": 160 * MIB, "gradients": 0, "optimizer": 80 * MIB}
        assert torch.cuda.memory_reserved() <= resident - 240 * MIB
        chunks = [chunk for offloaded in memory._offloaded.values() for one in offloaded for chunk in one.chunks or ()]
        assert all(chunk.is_pinned() for chunk in chunks)
        pinned.append({chunk.data_ptr() for chunk in chunks})
        memory.wake()
    assert pinned[0] == pinned[1]
    assert torch.equal(weights.cpu(), before[0]) and torch.equal(state.cpu(), before[1])


@pytest.mark.parametrize("changes", [{}, {"bf16": True, "use_distributed_optimizer": True}], ids=["fp32", "bf16"])
def test_offloading_after_every_step_gives_the_same_weights(changes: dict[str, Any], tmp_path: Path):
    model = tiny.save_qwen3(tmp_path / "model", seed=1)
    args = tiny.tiny_args(load=str(model), ref_load=str(model), use_kl_loss=True, kl_loss_coef=0.05, **changes)
    rollouts = [tiny.recorded_rollout(seed) for seed in range(3)]
    with RankPool(1) as pool:
        slept, awake = (pool.run(train, args, rollouts, sleeps)[0] for sleeps in (True, False))
    assert slept.metrics == awake.metrics
    assert all(torch.equal(value, slept.weights[name]) for name, value in awake.weights.items())


def reduce_around_sleep(rank: int, world_size: int, init_method: str, args: Arguments) -> tuple[list[float], list[int]]:
    """Sums over all ranks before and after an offload, and the free device bytes before, during and after it."""
    trainer = ranks.start(rank, world_size, init_method, args)
    ones = torch.ones(MIB, device=trainer.parallel.device)
    sums, free = [], []
    for _ in range(2):
        dist.all_reduce(ones, group=trainer.parallel.dp_group)
        sums.append(float(ones[0]))
        free.append(torch.cuda.mem_get_info()[0])
        trainer.memory.sleep()
        free.append(torch.cuda.mem_get_info()[0])
        trainer.memory.wake()
    trainer.close()
    return sums, free


@needs(gpus=2)
def test_communicators_work_after_suspension(tmp_path: Path):
    if torch.cuda.nccl.version() < SUSPENDS_SINCE:
        pytest.skip(f"NCCL {torch.cuda.nccl.version()} cannot suspend communicators")
    args = tiny.tiny_args(load=str(tiny.save_qwen3(tmp_path / "model", seed=1)), offload_train=True)
    with RankPool(2) as pool:
        for sums, free in pool.run(reduce_around_sleep, args):
            assert sums == [2.0, 4.0]
            # the tiny model's own memory is less than a MiB: the other freed memory belonged to NCCL
            assert free[1] - free[0] > 8 * MIB and free[3] - free[2] > 8 * MIB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Path]]]:
    """A server with the memory saver, on a fraction of the GPU, and its models."""
    root = tmp_path_factory.mktemp("server")
    folders = [tiny.save_qwen3(root / str(seed), seed=seed) for seed in range(2)]
    # the toys' heads of 16 channels are too narrow for other attention kernels
    options = {"skip_tokenizer_init": True, "mem_fraction_static": 0.3, "attention_backend": "triton"}
    started = ServerProcess(
        folders[0], log_path=root / "log", options=options, launch=ServerLaunch(True, memory_saver=True)
    )
    try:
        started.start()
        started.wait_ready(600)
        yield started.url, folders
    finally:
        started.stop()


@needs("sglang", "torch_memory_saver")
def test_server_frees_its_device_memory_and_generates_the_same_afterwards(server: tuple[str, list[Path]]):
    url, folders = server
    control = ServerControl(url)
    memory = EngineMemory([control])
    before, held = greedy(url), torch.cuda.mem_get_info()
    answers = []
    for version, folder in enumerate((folders[1], folders[0])):
        memory.release()
        free = torch.cuda.mem_get_info()[0]
        assert free - held[0] > 0.2 * held[1]  # most of the 0.3 it had
        memory.resume(["weights"])
        with control.weight_update(str(version)):
            control.update_weights_from_disk(str(folder))
        memory.resume(["kv_cache", "cuda_graph"])
        answers.append(greedy(url))
    assert answers[0] != before and answers[1] == before
