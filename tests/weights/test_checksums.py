"""Checksums against independent values: xxhsum, and SGLang's Triton kernel in Triton's interpreter."""

import pytest
import torch

from slimrl.engines.sglang.cpu_patches import hash_tensor
from slimrl.weights.update.verify import HostHasher, device_checksum, host_checksum


def test_host_checksum_is_the_xxh3_of_the_bytes():
    # printf abc | xxhsum -H2
    assert host_checksum(torch.tensor([97, 98, 99], dtype=torch.uint8)) == "06b05ab6733a618578af5f94892f3950"


def test_memory_of_a_hashed_tensor_can_be_offloaded():
    """numpy's view of a tensor would forbid it; a router's bias is a buffer that a colocated trainer offloads."""
    tensor = torch.arange(12.0)
    host_checksum(tensor)
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("tensor", [torch.arange(12.0).view(3, 4).T, torch.tensor(1.5), torch.zeros(0, 3)])
def test_trainer_and_engine_hash_host_memory_alike(tensor):
    assert host_checksum(tensor) == hash_tensor(tensor)


def test_parts_hash_like_the_concatenated_tensor_but_not_in_another_order():
    parts = torch.arange(24.0, dtype=torch.bfloat16).view(4, 6).split([1, 3])
    for order, equal in ((parts, True), (parts[::-1], False)):
        hasher = HostHasher()
        for part in order:
            hasher.update(part)
        assert (hasher.hexdigest() == host_checksum(torch.cat(parts))) is equal


@pytest.mark.parametrize("checksum", [host_checksum, device_checksum])
def test_any_single_flipped_bit_changes_the_checksum(checksum):
    whole = torch.arange(40, dtype=torch.int16)
    flipped = set()
    for bit in range(whole.nbytes * 8):
        changed = whole.clone()
        changed.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        flipped.add(checksum(changed))
    assert len(flipped) == 640 and checksum(whole) not in flipped


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.arange(6.0), "2a1f7701e39788f6"),
        (torch.arange(7, dtype=torch.bfloat16), "6acd222320afb5c2"),  # not a whole number of words
        (torch.arange(20000, dtype=torch.int32), "3fadc80e297acd67"),  # three tiles
    ],
    ids=["words", "half word", "tiles"],
)
def test_device_checksum_matches_the_engine_kernel(tensor, expected):
    assert device_checksum(tensor) == expected


def test_checksums_cover_every_byte_and_ignore_strides():
    table = torch.arange(12.0).view(3, 4)
    for checksum in (host_checksum, device_checksum):
        assert checksum(table.T) == checksum(table.T.contiguous()) != checksum(table)
        changed = table.clone()
        changed[2, 3] = torch.nextafter(changed[2, 3], torch.tensor(100.0))
        assert checksum(changed) != checksum(table)
