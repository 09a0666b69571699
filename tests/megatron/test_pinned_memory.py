"""Host memory for offloaded tensors: how much is allocated, and that every byte is restored."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.offload import CHUNK_BYTES, HostCopy, HostMemory
from tests.megatron import ranks, tiny
from tests.megatron.conftest import Models
from tests.megatron.launch import RankPool
from tests.megatron.test_rotary import YARN

KIB = 1024


class PowersOfTwo:
    """Allocates like torch's allocator of pinned memory; `taken` is the amount it had to pin."""

    def __init__(self) -> None:
        self.taken = 0
        self.requests = 0

    def __call__(self, size: int) -> Tensor:
        self.requests += 1
        self.taken += 1 << (size - 1).bit_length()
        return torch.empty(size, dtype=torch.uint8, device="meta")  # the sizes are those of a large model


def large_model() -> list[Tensor]:
    """The weights of Qwen3-8B in bfloat16, on meta: hidden 4096, feed-forward 12288, 36 layers, 151936 ids."""
    shapes = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4096,), (4096,), (128,), (128,)] * 36
    shapes += [(151936, 4096), (151936, 4096), (4096,)]
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]


def test_pinned_memory_is_the_tensor_size_plus_one_chunk():
    tensors, by_tensor, by_chunk = large_model(), PowersOfTwo(), PowersOfTwo()
    size = sum(tensor.nbytes for tensor in tensors)
    for tensor in tensors:
        by_tensor(tensor.nbytes)
    assert by_tensor.taken > 1.29 * size  # the amount that one buffer per tensor would pin
    memory = HostMemory(page_locked=True, allocate=by_chunk)
    copies = [HostCopy(tensors, memory) for _ in range(2)]
    assert len(copies) == 2
    assert 2 * size <= by_chunk.taken <= 2 * size + CHUNK_BYTES
    assert memory.nbytes == by_chunk.taken


def test_pinned_chunks_are_reused_and_pageable_ones_freed():
    allocator = PowersOfTwo()
    memory = HostMemory(page_locked=True, allocate=allocator)
    for _ in range(3):
        assert sum(piece.numel() for piece in memory.take(CHUNK_BYTES + 5)) == CHUNK_BYTES + 5
        memory.take(7)
        memory.free()
    assert (allocator.requests, memory.nbytes) == (2, 2 * CHUNK_BYTES)
    other = HostMemory(page_locked=False)
    other.take(5)
    other.free()
    assert other.nbytes == 0


def test_tensors_of_every_dtype_are_restored_bit_for_bit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slimrl.megatron.offload.CHUNK_BYTES", KIB)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(37, 41, generator=generator)
    tensors = [
        values.bfloat16(),  # 3034 bytes: over three chunks
        torch.tensor(3),
        values[:1, :3] > 0,
        torch.empty(0, 5),
        values.double().t(),  # not contiguous
        values[:, 5:7].clone(),
    ]
    expected = [tensor.clone() for tensor in tensors]
    places = [tensor.data_ptr() for tensor in tensors]
    memory = HostMemory(page_locked=False)
    copy = HostCopy(tensors, memory)
    copy.save(tensors)
    for tensor in tensors:
        tensor.zero_()
    copy.fill(tensors)
    assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
    assert [tensor.data_ptr() for tensor in tensors] == places
    assert memory.nbytes <= sum(tensor.nbytes for tensor in tensors) + len(tensors) * 64 + KIB


def hold(
    rank: int, world_size: int, init_method: str, args: Arguments, rollout: RolloutBatch
) -> tuple[int, int, int, int, list[bool]]:
    """Bytes of the reference: planned, held, the plan's chunk; rotary tables kept before and after an offload."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    from slimrl.arguments.memory import training_memory
    from slimrl.megatron import offload
    from slimrl.megatron.model.micro_batch import packed_sequences
    from slimrl.megatron.model.model_builder import build_model

    offload.CHUNK_BYTES = 4 * KIB
    made: list[Any] = []

    def remember(kind: type) -> None:
        make = kind.get_emb

        def get_emb(self: Any, *inputs: Any) -> Any:
            result = make(self, *inputs)
            made.append(weakref.ref(result[0] if isinstance(result, tuple) else result))
            return result

        kind.get_emb = get_emb

    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        remember(kind)
    trainer = ranks.start(rank, world_size, init_method, args)
    trainer.train(0, ranks.share_of(trainer, rollout))
    latent = build_model(tiny.tiny_args(**YARN), trainer.parallel)
    sequences = packed_sequences(torch.tensor([4, 3]), 1, trainer.parallel.device, rank=0)
    latent(torch.arange(7).unsqueeze(0), None, None, packed_seq_params=sequences)
    gc.collect()
    kept = sum(one() is not None for one in made)
    trainer.memory.sleep()
    gc.collect()
    left = [one() is not None for one in made]
    held = trainer._policy.reference.host_bytes
    trainer.memory.wake()
    trainer.close()
    return training_memory(args)[0].host, held, offload.CHUNK_BYTES, kept, left


@pytest.mark.slow
def test_reference_memory_matches_the_plan_and_offload_frees_rotary_tables(one_rank: RankPool, models: Models):
    args = tiny.tiny_args(
        load=str(models.policy), ref_load=str(models.reference), use_kl_loss=True, kl_loss_coef=0.05, **models.flags
    )
    ((planned, held, chunk, kept, left),) = one_rank.run(hold, args, tiny.recorded_rollout(3))
    assert planned <= held <= planned + chunk
    assert kept >= 2  # of the model's, and of the one with latent attention
    assert not any(left)
