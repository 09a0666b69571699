"""Checksums against independent values: sha256sum, and SGLang's Triton kernel in Triton's interpreter."""

import pytest
import torch

from slimrl.weights.update.verify import device_checksum, host_checksum


def test_host_checksum_is_a_prefix_of_the_sha256_of_the_bytes():
    # printf abc | sha256sum
    assert host_checksum(torch.tensor([97, 98, 99], dtype=torch.uint8)) == "ba7816bf8f01cfea"


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
