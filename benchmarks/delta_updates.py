"""Bytes and seconds of the changes of bf16 weights, by learning rate, beside those of all weights.

`python benchmarks/delta_updates.py [--elements 4000000]`: Adam steps. Weights are normal with a standard deviation of
0.02, as initialised; gradients share a direction. Every rate takes 20 steps, of which the medians of the last 15 are
shown. The limit is memcpy of the same bytes.

`python benchmarks/delta_updates.py --shape 0.3b [--rounds 3] [--bucket-mib 128]`: whole updates into one real SGLang
server of one rank. Each element moves to the next bf16 value with the probability that the Adam steps of a learning
rate give (`CHANGED`). In every round all ways send the same weights, in full and as changes: by shared memory, by
broadcast, and by files (XOR, and places with values). "Finding" reads the old and the new weights once, in
parts that stay in the processor's cache: the least that an update by changes takes on any way. "Faster below": the
speed of a network or a shared disk, which one machine does not have, below which the saved bytes outweigh the added
seconds. Every update ends with the full check of all tensors, whose seconds are left out. Needs 8 GiB of memory and 3
GiB of temporary disk for 0.3b.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from point_to_point import SHAPES
from torch import Tensor, nn
from weight_update import FAMILY, MIB, READY_S, arguments, build, share, write_folder

from slimrl.engines.sglang.server import ServerProcess
from slimrl.engines.sglang.server_args import delta_options
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.delta_files import changed_elements
from slimrl.weights.update.export import iter_hf_tensors
from slimrl.weights.update.topology import EngineEndpoint
from slimrl.weights.update.transport_changed_files import ChangedFiles
from slimrl.weights.update.transport_delta import DeltaUpdater, described
from slimrl.weights.update.weight_updater import ModelSource, WeightUpdater

RATES = (1e-7, 1e-6, 3e-6, 1e-5, 3e-5)
CHANGED = dict(zip(RATES, (0.0021, 0.0158, 0.0392, 0.1022, 0.2281), strict=True))  # as measured with --elements
SHAPES["0.3b"] = SHAPES["0.6b"] | dict(num_layers=14, vocab_size=75968, padded_vocab_size=75968)
FINDING, CACHED = "finding", 1 << 17  # bytes
STEPS, SHOWN = 20, 15
BETAS, EPSILON = (0.9, 0.98), 1e-8


def main() -> None:
    """Prints one line per learning rate, or per learning rate and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=4_000_000)
    parser.add_argument("--shape", choices=tuple(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bucket-mib", type=int, default=128)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.shape is None:
        measure_steps(chosen.elements)
    else:
        measure_updates(chosen.shape, chosen.rounds, chosen.bucket_mib * MIB)


def measure_steps(elements: int) -> None:
    """Prints one line per learning rate."""
    print("| learning rate | elements changed | bytes sent, of all | time to find and pack them, of memcpy of all |")
    print("| --- | --- | --- | --- |")
    for rate in RATES:
        changed, sent, seconds = zip(*measure(rate, elements), strict=True)
        shown = [statistics.median(values[-SHOWN:]) for values in (changed, sent, seconds)]
        print(f"| {rate:g} | {shown[0]:.2%} | {shown[1]:.3f} | {shown[2]:.1f} |", flush=True)


def measure(rate: float, elements: int) -> list[tuple[float, float, float]]:
    """Per step: the part of the elements that changed, of the bytes that are sent, and the time in those of memcpy."""
    generator = torch.Generator().manual_seed(0)
    weights = 0.02 * torch.randn(elements, generator=generator)
    direction = 3e-4 * torch.randn(elements, generator=generator)
    mean, square = torch.zeros(elements), torch.zeros(elements)
    old, copy, results = weights.bfloat16(), torch.empty(elements, dtype=torch.bfloat16), []
    for step in range(1, STEPS + 1):
        gradient = direction + 1e-3 * torch.randn(elements, generator=generator)
        mean.lerp_(gradient, 1 - BETAS[0])
        square.lerp_(gradient * gradient, 1 - BETAS[1])
        scaled = (square / (1 - BETAS[1] ** step)).sqrt() + EPSILON
        weights -= rate * mean / (1 - BETAS[0] ** step) / scaled
        new = weights.bfloat16()
        begun = time.perf_counter()
        copy.copy_(new)
        copied = time.perf_counter()
        delta = changed_elements("weight", (elements,), old, new)
        parts = described([delta])
        ended = time.perf_counter()
        part = float((old.view(torch.int16) != new.view(torch.int16)).double().mean())
        sent = sum(one.nbytes for one in parts.values())
        results.append((part, sent / new.nbytes, (ended - copied) / (copied - begun)))
        old = new
    return results


def move(model: nn.Module, part: float, generator: torch.Generator) -> None:
    """Moves about `part` of the elements to the next bf16 value away from zero."""
    for parameter in model.parameters():
        chosen = torch.rand(parameter.shape, generator=generator) < part
        parameter.data.view(torch.int16).add_(chosen.to(torch.int16))


def find(old: list[Tensor], new: list[Tensor]) -> float:
    """Seconds to compare the tensors."""
    begun, different = time.perf_counter(), 0
    for before, after in zip(old, new, strict=True):
        one, other = (tensor.detach().view(torch.uint8).numpy().ravel() for tensor in (before, after))
        for start in range(0, one.size, CACHED):
            different += not np.array_equal(one[start : start + CACHED], other[start : start + CACHED])
    assert different
    return time.perf_counter() - begun


def measure_updates(shape: str, rounds: int, bucket_bytes: int) -> None:
    """Prints one line per learning rate and way."""
    args = arguments(shape)
    spec = ModelSpec.from_args(args)
    built, state = build(args)
    share(built)
    source, options = ModelSource(spec, FAMILY, state), {"skip_tokenizer_init": True, "max_total_tokens": 2048}
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        origin = write_folder(place / "hf", args, lambda: iter_hf_tensors(built, spec, FAMILY))
        server = ServerProcess(
            origin, log_path=place / "log", options=options | {"dtype": "bfloat16"} | delta_options({})
        )
        try:
            server.start()
            server.wait_ready(READY_S)
            engines = [EngineEndpoint(server.url, [0])]
            ways: dict[str, WeightUpdater] = {
                "shared memory, full": WeightUpdater.colocated(source, engines, bucket_bytes=bucket_bytes),
                "shared memory, changes": DeltaUpdater.colocated(source, engines, bucket_bytes=bucket_bytes),
                "broadcast, full": WeightUpdater.split(source, engines, bucket_bytes=bucket_bytes),
                "broadcast, changes": DeltaUpdater.split(source, engines, bucket_bytes=bucket_bytes),
                "files, full": WeightUpdater.disk(
                    source, engines, place / "full", every_rank=True, bucket_bytes=bucket_bytes
                ),
            }
            for encoding in ("xor", "overwrite"):
                changes = ChangedFiles(place / encoding, origin, encoding)
                ways[f"files, changes ({encoding})"] = DeltaUpdater.disk(
                    source, engines, place / f"{encoding} updates", changes=changes, bucket_bytes=bucket_bytes
                )
            time_ways(built, ways, rounds)
            for updater in ways.values():
                updater.close()
        finally:
            server.stop()


def time_ways(built: nn.Module, ways: dict[str, WeightUpdater], rounds: int) -> None:
    """All ways alternate; before the first round of all, each sends all weights."""
    generator = torch.Generator().manual_seed(0)
    for way, updater in ways.items():
        updater.update_weights(built, version=f"{way} first", check_equal=True)
    print(
        "| learning rate | way | bytes sent, of all | seconds | of the full update | faster below, MB/s |", flush=True
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for rate, part in CHANGED.items():
        seconds, sent = defaultdict(list), defaultdict(list)
        for number in range(rounds):
            old = [parameter.data.clone() for parameter in built.parameters()]
            move(built, part, generator)
            seconds[FINDING].append(find(old, list(built.parameters())))
            del old
            for way, updater in ways.items():
                report = updater.update_weights(built, version=f"{rate} {way} {number}", check_equal=True)
                assert report.attempts == 1
                seconds[way].append(report.seconds - report.check_seconds)
                sent[way].append(report.bytes)
        middle = {way: statistics.median(values) for way, values in seconds.items()}
        whole = statistics.median(sent["broadcast, full"])
        for way in ways:
            name, _, kind = way.partition(", ")
            full = f"{name}, full"
            bytes_sent, ratio, limit = statistics.median(sent[way]), "", ""
            if kind != "full":
                ratio = f"{middle[way] / middle[full]:.2f}"
                added = middle[way] - middle[full]
                limit = f"{(whole - bytes_sent) / added / 1e6:.0f}" if added > 0 else "always"
            print(
                f"| {rate:g} | {way} | {bytes_sent / whole:.4f} | {middle[way]:.2f} | {ratio} | {limit} |", flush=True
            )
        ratio = middle[FINDING] / middle["shared memory, full"]
        print(f"| {rate:g} | finding alone | | {middle[FINDING]:.2f} | {ratio:.2f} of shared memory | |", flush=True)


if __name__ == "__main__":
    main()
