"""Buckets in shared memory: which receiver opens which, and how long they stay."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slimrl.weights.update.buckets import Bucket, iter_buckets
from slimrl.weights.update.shared_memory import (
    LARGE,
    HostSharedBuffer,
    Reference,
    collapse,
    shared_copies,
    shared_file,
)
from slimrl.weights.update.transport_tensor import EngineLink, serialize, serialize_named

ROOT = Path(__file__).resolve().parents[2]


def bucket_of(buffer: HostSharedBuffer, value: float) -> Bucket:
    (bucket,) = iter_buckets(iter([("w", torch.full((4,), value))]), 1024, buffer)
    return bucket


def opened(payload: str) -> list[float]:
    flat = pickle.loads(base64.b64decode(payload))["flattened_tensor"]
    return flat[:16].view(torch.float32).tolist()


@pytest.fixture
def one_rank_world(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_receiver_opens_only_its_own_of_several_references(one_rank_world):
    buffer = HostSharedBuffer()
    bucket = bucket_of(buffer, 3.0)
    own: Reference = buffer.reference()
    elsewhere: Reference = (own[0], ("/proc/0/fd/0", True, own[1][2]))  # a file that cannot be opened here
    assert opened(serialize(bucket, [own, elsewhere])) == [3.0] * 4
    with pytest.raises(RuntimeError, match="/proc/0/fd/0"):
        opened(serialize(bucket, [elsewhere, own]))
    assert opened(serialize(bucket, [own])) == [3.0] * 4
    buffer.close()


def test_sender_gives_every_rank_of_every_stage_the_same_payload():
    buffer = HostSharedBuffer()
    bucket = bucket_of(buffer, 5.0)
    link = EngineLink(server=None, tensor_parallel_size=2, senders=(0, 0, 0, 0), group=None)
    payloads = link.payloads(bucket, buffer.reference())
    assert link.has_stages and [opened(payload) for payload in payloads] == [[5.0] * 4] * 2
    buffer.close()


def test_memory_of_a_bucket_is_reused():
    buffer = HostSharedBuffer()
    first = serialize(bucket_of(buffer, 1.0), [buffer.reference()])
    bucket_of(buffer, 2.0)
    assert opened(first) == [2.0] * 4
    buffer.close()


def test_kept_buckets_are_unchanged_until_released():
    before = set(os.listdir("/proc/self/fd"))
    buffer = HostSharedBuffer(keep=True)
    payloads = [serialize(bucket_of(buffer, value), [buffer.reference()]) for value in (1.0, 2.0, 3.0)]
    assert [opened(payload) for payload in payloads] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
    buffer.release()
    assert set(os.listdir("/proc/self/fd")) == before
    for payload in payloads:
        with pytest.raises(RuntimeError):
            opened(payload)
    # and again, for the next weight update
    assert opened(serialize(bucket_of(buffer, 4.0), [buffer.reference()])) == [4.0] * 4
    buffer.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_reused_buffer_keeps_its_content_and_length(tmp_path):
    buffer = HostSharedBuffer()
    size = 3 * LARGE + 4096 + 8  # not full huge pages
    values = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        taken = buffer.take(size)
        taken.copy_(values)
        values = values.roll(1)
    before = taken.clone()
    assert torch.equal(buffer.take(size), before)  # collapsed by now, if the kernel provides huge pages
    function, arguments = buffer.reference()
    assert torch.equal(function(*arguments)[:size], before)
    buffer.close()


def test_only_fully_written_huge_pages_are_collapsed(tmp_path):
    with open(tmp_path / "file", "w+b") as file:
        assert collapse(file.fileno(), 0) == 0
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 4 * LARGE)
    os.pwrite(descriptor, b"x" * (2 * LARGE + 100), 0)
    assert collapse(descriptor, 0) == 2 * LARGE
    assert collapse(descriptor, 2 * LARGE) == 2 * LARGE
    assert os.pread(descriptor, 3 * LARGE, 0) == b"x" * (2 * LARGE + 100) + bytes(LARGE - 100)
    os.close(descriptor)


def test_copies_are_in_one_file_that_closes_with_the_last_of_them():
    before = set(os.listdir("/proc/self/fd"))
    tensors = [torch.arange(3.0), torch.ones(5, dtype=torch.bfloat16), torch.arange(12).view(4, 3).T]
    copies = shared_copies(tensors)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))
    assert all(copy.is_contiguous() and copy.data_ptr() % 64 == 0 for copy in copies)
    assert len({shared_file(copy) for copy in copies}) == 1 and shared_file(copies[0]) is not None
    assert [shared_file(tensor) for tensor in tensors] == [None] * 3
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.data = copies[0]
    del copies
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1
    del parameter
    assert set(os.listdir("/proc/self/fd")) == before


def test_receiver_opens_weights_where_they_are_and_packed_tensors_in_the_bucket():
    table, half = shared_copies([torch.arange(12.0).view(3, 4), torch.ones(5, dtype=torch.bfloat16)])
    named = {"table": table[1:], "packed": torch.full((2, 2), 7.0), "half": half, "wide": torch.ones(1)}
    buffer = HostSharedBuffer()
    (bucket,) = iter_buckets(named.items(), 1024, buffer, opens=lambda tensor: shared_file(tensor) is not None)
    assert [entry.shared is None for entry in bucket.entries] == [False, True, False, True]
    found = dict(pickle.loads(base64.b64decode(serialize_named(bucket, buffer.reference()))))
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in found.items()} == {
        name: (tensor.dtype, tensor.tolist()) for name, tensor in named.items()
    }
    table[1, 0] = -1  # the same memory
    assert found["table"][0, 0] == -1 and found["packed"].data_ptr() != named["packed"].data_ptr()
    buffer.close()


@pytest.mark.slow
def test_sglang_opens_a_cuda_handle_on_its_own_index_of_the_gpu():
    done = subprocess.run(
        [sys.executable, "-m", "tests.weights.cuda_handle"], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == 1  # 3 at the sender
    assert found["class"] == "Tensor" and found["dtype"] == "torch.uint8"
    assert found["handle"] == ["h" * 66, 4096, 256] and found["event"] == ["event", True]
    assert found["tensors"] == {"a.weight": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "b": [7.0]}
    assert found["shapes"] == {"a.weight": [2, 3], "b": [1]}
