"""The machine itself: whether torch sees its GPUs, their products are right, and the packages have tested versions.

Both checks evaluate the result of `machine.look`, which the runner passes as a file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.gpu_check.machine import PACKAGES, tested_versions
from tools.gpu_check.record import Record

BF16_CAPABILITY = [8, 0]
LEAST_SHARED_MEMORY = 1e9  # bytes; Docker's default of 64 MB is too small for Ray and for NCCL
GIB = 2**30
# both products have the same rounded inputs; the result is rounded to 8 bits, once or after each of a few partial sums
PRODUCT_BOUND = 2**-7


def environment(record: Record, machine: str, device: str, size: int = 8192, rounds: int = 10) -> None:
    """Driver, versions and GPUs, and a product of two `size` x `size` bf16 matrices on each GPU."""
    facts = json.loads(Path(machine).read_text(encoding="utf-8"))["facts"]
    describe(record, facts)
    if "torch" not in facts["packages"]:
        return
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return
    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if device == "cuda" else [device]
    found = [product(name, size, rounds) for name in names]
    errors, speeds = zip(*found, strict=True)
    record.figure("bf16 matrix product, largest error", max(errors), at_most=PRODUCT_BOUND)
    record.figure("speed of the slowest", min(speeds), "TFLOP/s")
    if len(speeds) > 1:
        record.figure("speed of the fastest", max(speeds), "TFLOP/s")


def describe(record: Record, facts: Mapping[str, Any]) -> None:
    """Figures of driver, versions and GPUs, and what is wrong with them."""
    driver, seen = facts["driver"], facts["torch"]
    gpus = seen.get("gpus", [])
    if driver:
        record.figure("driver", driver["version"])
    for name in ("cuda", "hip", "nccl"):
        if seen.get(name):
            record.figure({"cuda": "CUDA of torch", "hip": "HIP of torch", "nccl": "NCCL"}[name], str(seen[name]))
    for name in sorted({gpu["name"] for gpu in gpus}):
        same = [gpu for gpu in gpus if gpu["name"] == name]
        record.figure("GPUs", f"{len(same)} x {name}, {same[0]['memory_bytes'] / GIB:.0f} GiB")
    if gpus:
        record.figure("least free memory", min(gpu["free_bytes"] for gpu in gpus) / GIB, "GiB")
    for complaint in complaints(facts):
        record.complain_about(complaint)


def complaints(facts: Mapping[str, Any]) -> list[str]:
    """The facts that keep slimrl from working; a pure function."""
    driver, seen = facts["driver"], facts["torch"]
    gpus, listed = seen.get("gpus", []), driver.get("gpus", [])
    hidden = "CUDA_VISIBLE_DEVICES" in facts["environment"]
    found = [f"torch cannot be imported: {seen['error']}"] if "error" in seen else []
    if listed and seen and "error" not in seen and not gpus and not hidden:
        build = f"is built for CUDA {seen['cuda']}" if seen.get("cuda") else "is built without CUDA"
        found.append(
            f"nvidia-smi lists {len(listed)} GPUs and torch {seen['version']}, which {build}, sees none: install the"
            f" build for driver {driver['version']}, or a newer driver"
        )
    old = sorted({gpu["name"] for gpu in gpus if gpu["capability"] < BF16_CAPABILITY})
    if old and not seen.get("hip"):
        found.append(f"{', '.join(old)} has no bf16 units (compute capability below 8.0)")
    shared = facts["shared_memory_bytes"]
    if gpus and shared is not None and shared < LEAST_SHARED_MEMORY:
        found.append(
            f"/dev/shm has {shared / 1e6:.0f} MB, too little for Ray and NCCL: start the container with"
            " --ipc=host or --shm-size=64g"
        )
    return found


def product(device: str, size: int, rounds: int) -> tuple[float, float]:
    """(largest error of a part of the product as a fraction of its largest value, TFLOP/s)."""
    import torch

    torch.manual_seed(0)
    left, right = (torch.randn(size, size).bfloat16() for _ in range(2))
    on_device = left.to(device), right.to(device)
    result = on_device[0] @ on_device[1]
    rows = min(size, 64)  # float64 on the CPU is slow
    truth = left[:rows].double() @ right.double()
    error = float((result[:rows].cpu().double() - truth).abs().max() / truth.abs().max())
    synchronize(device)
    started = time.perf_counter()
    for _ in range(rounds):
        torch.mm(*on_device, out=result)
    synchronize(device)
    return error, 2 * size**3 * rounds / (time.perf_counter() - started) / 1e12


def synchronize(device: str) -> None:
    """Waits for the work queued on a GPU."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def packages(record: Record, machine: str) -> None:
    """Installed versions; an untested version fails the check, an absent package does not."""
    installed = json.loads(Path(machine).read_text(encoding="utf-8"))["facts"]["packages"]
    compare_versions(record, installed, tested_versions())


def compare_versions(record: Record, installed: Mapping[str, str], tested: Mapping[str, str]) -> None:
    """`installed` by import name, `tested` by distribution."""
    for name, version in installed.items():
        record.figure(PACKAGES[name], version or "unknown version")
    present = {PACKAGES[name]: version for name, version in installed.items()}
    for distribution, wanted in tested.items():
        found = present.get(distribution)
        if found is not None and found.split("+")[0] != wanted:  # "+cu130" names the build
            record.complain_about(f"{distribution} is {found or 'of an unknown version'}, tested version: {wanted}")
    if absent := [name for name in PACKAGES.values() if name in tested and name not in present]:
        record.figure("not installed", ", ".join(absent))
