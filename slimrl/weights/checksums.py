"""The checksums by which SGLang's /weights_checker names the content of a tensor, computed from our own tensor.

A server hashes tensors in host memory with SHA-256 and tensors on a GPU with a tiled 32-bit mix; both are
functions of the raw bytes alone. The formulas were read from SGLang 0.5.20 and are written anew here.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_TILE_WORDS = 8192
_TILES_AT_ONCE = 512  # bounds the memory of the 64-bit intermediates to a few hundred megabytes
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_SEED = 0x243F6A88


def host_checksum(tensor: Tensor) -> str:
    """First 8 bytes of the SHA-256 of the tensor's bytes, in hex."""
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(memoryview(raw.numpy())).digest()[:8].hex()


def device_checksum(tensor: Tensor) -> str:
    """The GPU checksum in hex, computed on the tensor's own device.

    With the bytes as 32-bit words v_i, per tile of 8192 words and for each of two lanes:
    h = fmix(sum_i fmix(v_i ^ (i * P + s) ^ rotl(i, r)) ^ n_bytes); the tiles' 64-bit values (lane 1 above
    lane 2) are added, and the sum is finished by splitmix64's mix.
    """
    words = _words(tensor)
    count = words.numel()
    if count == 0:
        return f"{0:016x}"
    total = 0
    step = _TILES_AT_ONCE * _TILE_WORDS
    for start in range(0, count, step):
        part = words[start : start + step].to(torch.int64) & _MASK32
        place = torch.arange(start, start + part.numel(), device=part.device) & _MASK32
        upper = _lane(part, place, count, multiplier=0x27D4EB2D, seed=_SEED, rotation=15)
        lower = _lane(part, place, count, multiplier=0x165667B1, seed=(_SEED * 0x9E3779B1) ^ 0xDEADBEEF, rotation=13)
        total += sum((high << 32) | low for high, low in zip(upper.tolist(), lower.tolist(), strict=True))
    return f"{_splitmix(total & _MASK64):016x}"


def _words(tensor: Tensor) -> Tensor:
    """The bytes as int32, padded with zero bytes to whole words."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    missing = -raw.numel() % 4
    return (torch.nn.functional.pad(raw, (0, missing)) if missing else raw).view(torch.int32)


def _lane(part: Tensor, place: Tensor, count: int, *, multiplier: int, seed: int, rotation: int) -> Tensor:
    """One 32-bit value per tile of `part`."""
    turned = ((place << rotation) | (place >> (32 - rotation))) & _MASK32
    mixed = _fmix(part ^ ((place * multiplier + (seed & _MASK32)) & _MASK32) ^ turned)
    missing = -mixed.numel() % _TILE_WORDS
    tiles = torch.nn.functional.pad(mixed, (0, missing)).view(-1, _TILE_WORDS)
    return _fmix((tiles.sum(dim=1) & _MASK32) ^ (count * 4 & _MASK32))


def _fmix(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser on 64-bit integers that hold 32-bit values."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)


def _splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
