"""Weight updates from trainer shards straight to engine ranks, against the gathered broadcast.

    python benchmarks/point_to_point.py [--shape 0.6b] [--trainers 2] [--engines 2,1] [--rounds 5] [--buffer-mib 128]

Trainer ranks with tensor parallelism send bf16 weights to real SGLang servers of the given tensor-parallel sizes: by
gather and broadcast from rank 0, point to point by a process group (gloo here), and by Mooncake (TCP here) where it can
be imported. The ways alternate in every round, and every update has other weights. In a round of its own each way is
followed by the full check: the checksums of every tensor of every server against the gathered weights, so that equal
bits of one way mean equal bits of all. Prints for each way the bytes that an engine rank receives, those of the busiest
trainer rank, the median seconds, and the ratio of the broadcast's seconds to them. Needs 8 GiB of memory for 0.6b.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Sequence
from multiprocessing.queues import Queue
from pathlib import Path

import torch
import xxhash
from ratios import add_json_option, write_ratios
from torch import nn
from weight_update import FAMILY, MIB, READY_S, SHAPES, arguments, hf_config

from slimrl.engines.sglang.server import ServerProcess
from slimrl.engines.sglang.server_args import point_to_point_options
from slimrl.megatron import parallel
from slimrl.megatron.model import model_builder
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.point_to_point.updater import PointToPointUpdater
from slimrl.weights.update.topology import EngineEndpoint
from slimrl.weights.update.weight_updater import ModelSource, WeightUpdater, WeightUpdateReport

SHAPES["0.1b"] = SHAPES["0.6b"] | dict(num_layers=8, hidden_size=512, ffn_hidden_size=1536, vocab_size=32000)
SHAPES["0.1b"] |= dict(padded_vocab_size=32000)
BROADCAST, PROCESS_GROUP, MOONCAKE = "broadcast", "p2p, gloo", "p2p, Mooncake"
Reports = dict[str, list[WeightUpdateReport]]


def change(model: nn.Module, version: int) -> None:
    """Other weights; those that all ranks have change alike."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seed = xxhash.xxh3_64_intdigest(f"{name} {version}".encode()) >> 1
            offset = torch.rand(parameter.shape[-1], generator=torch.Generator().manual_seed(seed))
            parameter.add_(0.01 * (offset - 0.5).to(parameter.dtype))


def train(
    rank: int, size: int, shape: str, store: str, engines: list[EngineEndpoint], rounds: int, buffer: int, out: Queue
) -> None:
    """One trainer rank; puts its reports of each way into `out`: of `rounds` updates, then of that with the check."""
    torch.set_num_threads(1)
    args = arguments(shape)
    args.tensor_model_parallel_size = size
    state = parallel.initialize(args, rank=rank, world_size=size, local_rank=rank, init_method=store)
    model = model_builder.build_model(args, state)
    source = ModelSource(ModelSpec.from_args(args), FAMILY, state)
    ways: dict[str, WeightUpdater] = {
        BROADCAST: WeightUpdater.split(source, engines, bucket_bytes=buffer),
        PROCESS_GROUP: PointToPointUpdater(source, engines, bucket_bytes=buffer),
    }
    if importlib.util.find_spec("mooncake") is not None:
        ways[MOONCAKE] = PointToPointUpdater(source, engines, transport="mooncake", bucket_bytes=buffer)
    reports: Reports = {way: [] for way in ways}
    for number in range(rounds + 2):  # the first makes connections and memory, the last is checked
        for way, updater in ways.items():
            change(model, number)
            checked = number == rounds + 1
            reports[way].append(updater.update_weights(model, version=f"{way} {number}", check_equal=checked))
    plan = ways[PROCESS_GROUP].plan
    out.put((rank, plan.total_bytes, {way: own[1:] for way, own in reports.items()}))
    for updater in ways.values():
        updater.close()
    parallel.shutdown()


def measure(shape: str, trainers: int, engines: list[EngineEndpoint], rounds: int, buffer: int) -> tuple[int, Reports]:
    """All bytes of a point-to-point update, and the reports of rank 0, whose bytes are those of the busiest rank."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        ranks = [
            context.Process(target=train, args=(rank, trainers, shape, store, engines, rounds, buffer, out))
            for rank in range(trainers)
        ]
        for process in ranks:
            process.start()
        found = [out.get() for _ in ranks]
        for process in ranks:
            process.join()
    return min(found, key=lambda one: one[0])[1:]


def start(shape: str, sizes: Sequence[int], folder: Path) -> list[ServerProcess]:
    """Servers with made-up weights."""
    (folder / "config.json").write_text(json.dumps(hf_config(arguments(shape))))
    options = {"skip_tokenizer_init": True, "max_total_tokens": 2048, "dtype": "bfloat16", "load_format": "dummy"}
    options |= point_to_point_options({})
    servers = [
        ServerProcess(folder, log_path=folder / f"{number}.log", tensor_parallel_size=size, options=options)
        for number, size in enumerate(sizes)
    ]
    for server in servers:
        server.start()
    return servers


def show(planned: int, reports: Reports, ranks: int, json_path: Path | None) -> None:
    """Prints a row for each way."""
    seconds = {way: statistics.median(one.seconds for one in own[:-1]) for way, own in reports.items()}
    print(
        "way             into an engine rank  from the busiest trainer rank  seconds  broadcast's / these  bits equal"
    )
    ratios = {}
    for way, own in reports.items():
        sent = own[-1].bytes
        received = sent if way == BROADCAST else planned / ranks
        ratios[way] = seconds[BROADCAST] / seconds[way]
        equal = "yes" if own[-1].check_seconds > 0 else "not checked"
        print(
            f"{way:15} {received / MIB:14.0f} MiB {sent / MIB:24.0f} MiB {seconds[way]:10.2f} {ratios[way]:20.2f}"
            f"  {equal}"
        )
    write_ratios(json_path, {f"seconds of the broadcast / {way}": one for way, one in ratios.items()})


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--engines", default="2", help="tensor-parallel sizes of the servers, with commas between")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--buffer-mib", type=int, default=128)
    add_json_option(parser)
    chosen = parser.parse_args()
    sizes = [int(size) for size in chosen.engines.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        servers = start(chosen.shape, sizes, Path(folder))
        try:
            for server in servers:
                server.wait_ready(READY_S)
            first, engines = chosen.trainers, []
            for server, size in zip(servers, sizes, strict=True):
                engines.append(EngineEndpoint(server.url, range(first, first + size)))
                first += size
            print(f"{chosen.shape} shape, {chosen.trainers} trainer ranks, engines of {chosen.engines} ranks")
            planned, reports = measure(chosen.shape, chosen.trainers, engines, chosen.rounds, chosen.buffer_mib * MIB)
            show(planned, reports, sum(sizes), chosen.json)
        finally:
            for server in servers:
                server.stop()


if __name__ == "__main__":
    main()
