"""Bytes and seconds of an update of LoRA adapters into a real server, against merged weights and a whole model.

    python benchmarks/adapter_updates.py [--shape 0.6b] [--rank 32] [--rounds 5]

One training rank and one SGLang server with `--enable-lora` (bf16, random weights, every projection adapted). In
interleaved rounds: the adapters by tensors; the merged weights and those of a model without adapters, both through
shared memory and by broadcast. Shown are the bytes that each update sends, and its seconds: the first, with the
comparison of the base, and the median of the others. Needs 8 GiB of memory for the 0.6B shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from weight_update import FAMILY, MIB, READY_S, SHAPES, arguments, build, share, write_folder

from slimrl.engines.sglang.server import ServerProcess
from slimrl.engines.sglang.server_args import adapter_options
from slimrl.megatron import parallel
from slimrl.models.adapters import AdapterConfig
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.adapters import initialize_adapters
from slimrl.weights.update.adapter_updater import AdapterUpdater
from slimrl.weights.update.export import iter_hf_tensors
from slimrl.weights.update.topology import EngineEndpoint
from slimrl.weights.update.weight_updater import ModelSource, WeightUpdater, WeightUpdateReport

BUCKET_BYTES = 128 * MIB


class Updates:
    """The ways of updating one server, by name."""

    def __init__(self, built: nn.Module, base: ModelSource, config: AdapterConfig, url: str) -> None:
        self._built = built
        engines = [EngineEndpoint(url, [0])]
        merged = dataclasses.replace(base, merge_adapters=True)
        self.ways = {
            "adapters by tensors": AdapterUpdater(base, config, engines, BUCKET_BYTES),
            "merged weights, shared memory": WeightUpdater.colocated(merged, engines, bucket_bytes=BUCKET_BYTES),
            "a whole model, shared memory": WeightUpdater.colocated(base, engines, bucket_bytes=BUCKET_BYTES),
            "merged weights, broadcast": WeightUpdater.split(merged, engines, bucket_bytes=BUCKET_BYTES),
            "a whole model, broadcast": WeightUpdater.split(base, engines, bucket_bytes=BUCKET_BYTES),
        }

    def run(self, way: str, version: str) -> WeightUpdateReport:
        """One update; the adapters' base in the server is the trainer's before each of theirs."""
        return self.ways[way].update_weights(self._built, version=version)

    def close(self) -> None:
        for updater in self.ways.values():
            updater.close()


def base_tensors(built: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """The weights without the adapters."""
    return iter_hf_tensors(built, spec, FAMILY, merge_adapters=False)


def measure(updates: Updates, rounds: int) -> dict[str, list[WeightUpdateReport]]:
    """The reports of each way; a merged update leaves the server another base, which a whole one restores."""
    found: dict[str, list[WeightUpdateReport]] = {way: [] for way in updates.ways}
    for number in range(rounds + 1):
        for way, reports in found.items():
            reports.append(updates.run(way, f"{number}"))
    return found


def main() -> None:
    """Measures and prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--rank", type=int, default=32, help="of the adapters")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    args = dataclasses.replace(arguments(chosen.shape), lora_rank=chosen.rank)
    config, spec = AdapterConfig.from_args(args), ModelSpec.from_args(args)
    assert config is not None
    built, state = build(args)
    share(built)
    initialize_adapters(built, 1, 0, 1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_folder(Path(temporary) / "hf", args, lambda: base_tensors(built, spec))
        options = {"skip_tokenizer_init": True, "max_total_tokens": 2048, "dtype": "bfloat16"}
        options |= adapter_options(config, releases_memory=False)
        server = ServerProcess(folder, log_path=Path(temporary) / "log", options=options)
        try:
            server.start()
            server.wait_ready(READY_S)
            updates = Updates(built, ModelSource(spec, FAMILY, state, merge_adapters=False), config, server.url)
            found = measure(updates, chosen.rounds)
            updates.close()
        finally:
            server.stop()
    parallel.shutdown()
    print(f"\n{chosen.shape} shape, adapters of rank {chosen.rank}, one SGLang server")
    print("way                                  bytes      first  median of later")
    for way, reports in found.items():
        later = statistics.median(report.seconds for report in reports[1:])
        print(f"{way:32} {reports[0].bytes / 1e6:7.1f} MB {reports[0].seconds:8.2f} s {later:8.3f} s")


if __name__ == "__main__":
    main()
