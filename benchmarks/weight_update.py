"""Speed of weight updates: the shared-memory bucket compared with memcpy, and whole weight updates into a real server.

    python benchmarks/weight_update.py [--rounds 5] [--parts buckets,tiny,0.6b] [--bucket-mib 128]

`buckets`: bytes per second of the 0.6B shape's weights, on one core each, in interleaved rounds: memcpy from one tensor
into another; packed from a Megatron model into the shared bucket; read from a bucket by another process, which maps it
again as a server does; and end to end, where one bucket is packed while the other is read. Target: packing at half of
memcpy or more. `tiny`, `0.6b`: seconds of a weight update into one real SGLang server (bf16, random weights), for each
transport, the peak memory above that before the weight update, of this process and of the server, and the cost of the
full check. Needs 6 GiB of memory and of temporary disk for the 0.6B shape.
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from ratios import add_json_option, write_ratios
from torch import Tensor, nn

from slimrl.arguments import Arguments
from slimrl.engines.sglang.server import ServerProcess
from slimrl.megatron import parallel
from slimrl.megatron.model import model_builder
from slimrl.models.families import family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.safetensors_writer import ShardWriter, TensorSpec, plan_shards
from slimrl.weights.update.buckets import iter_buckets
from slimrl.weights.update.export import iter_hf_tensors
from slimrl.weights.update.topology import EngineEndpoint
from slimrl.weights.update.transport_tensor import HostSharedBuffer, SharedDoubleBuffer, serialize
from slimrl.weights.update.weight_updater import ModelSource, WeightUpdater

FAMILY = family_for({"model_type": "qwen3"})
SHAPES = {
    "tiny": dict(
        num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2, kv_channels=16
    )
    | dict(vocab_size=128, padded_vocab_size=128),
    "0.6b": dict(num_layers=28, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=16, num_query_groups=8)
    | dict(kv_channels=128, vocab_size=151936, padded_vocab_size=151936),
}
TRANSPORTS = {"shared tensors": "colocated", "broadcast": "split", "disk": "disk"}
READY_S = 300.0
MIB = 1024**2


def arguments(name: str) -> Arguments:
    """Flags of the shape, bf16."""
    return Arguments(
        **SHAPES[name],
        group_query_attention=True,
        normalization="RMSNorm",
        norm_epsilon=1e-6,
        qk_layernorm=True,
        swiglu=True,
        add_bias_linear=False,
        rotary_base=1000000,
        max_position_embeddings=4096,
        expert_tensor_parallel_size=1,
        use_distributed_optimizer=False,
        bf16=True,
    )


def hf_config(args: Arguments) -> dict:
    """The Hugging Face config of the same shape."""
    return dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.ffn_hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_query_groups,
        head_dim=args.kv_channels,
        hidden_act="silu",
        max_position_embeddings=args.max_position_embeddings,
        rms_norm_eps=args.norm_epsilon,
        rope_theta=args.rotary_base,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        eos_token_id=1,
    )


def read_buckets(connection: Connection, shapes: list[tuple[str, tuple[int, ...]]]) -> None:
    """The receiving process: copies each bucket into its own tensors and replies with the seconds taken."""
    torch.set_num_threads(1)
    own = {name: torch.zeros(dims, dtype=torch.bfloat16) for name, dims in shapes}
    connection.send(None)
    while (payload := connection.recv()) is not None:
        started = time.perf_counter()
        opened = pickle.loads(base64.b64decode(payload))
        for entry in opened["metadata"]:
            flat = opened["flattened_tensor"][entry.start_idx : entry.end_idx]
            own[entry.name].copy_(flat.view(entry.dtype).view(entry.shape))
        del opened, flat
        connection.send(time.perf_counter() - started)


class Buckets:
    """The ways of one model's bytes, each as seconds per round."""

    def __init__(self, built: nn.Module, spec: ModelSpec, bucket_bytes: int) -> None:
        self._export = lambda: iter_hf_tensors(built, spec, FAMILY)
        self._bytes = bucket_bytes
        self._sources = [torch.empty_like(tensor).copy_(tensor) for _, tensor in self._export()]
        self._targets = [torch.zeros_like(tensor) for tensor in self._sources]
        self.num_bytes = sum(tensor.nbytes for tensor in self._sources)
        self._buffer = SharedDoubleBuffer(HostSharedBuffer(), HostSharedBuffer())
        ours, theirs = multiprocessing.Pipe()
        shapes = [(name, tuple(tensor.shape)) for name, tensor in self._export()]
        context = multiprocessing.get_context("spawn")
        self._reader = context.Process(target=read_buckets, args=(theirs, shapes), daemon=True)
        self._reader.start()
        self._connection = ours
        ours.recv()

    def memcpy(self) -> float:
        started = time.perf_counter()
        for source, target in zip(self._sources, self._targets, strict=True):
            target.copy_(source)
        return time.perf_counter() - started

    def pack(self) -> float:
        started = time.perf_counter()
        for _ in iter_buckets(self._export(), self._bytes, self._buffer):
            pass
        self._buffer.release()
        return time.perf_counter() - started

    def read(self) -> float:
        seconds = 0.0
        for bucket in iter_buckets(self._export(), self._bytes, self._buffer):
            self._connection.send(serialize(bucket, [self._buffer.reference()]))
            seconds += self._connection.recv()
        self._buffer.release()
        return seconds

    def whole_way(self) -> float:
        started, under_way = time.perf_counter(), False
        for bucket in iter_buckets(self._export(), self._bytes, self._buffer):
            if under_way:
                self._connection.recv()
            self._connection.send(serialize(bucket, [self._buffer.reference()]))
            under_way = True
        self._connection.recv()
        self._buffer.release()
        return time.perf_counter() - started

    def close(self) -> None:
        self._connection.send(None)
        self._reader.join()
        self._buffer.close()


def measure_buckets(rounds: int, bucket_bytes: int, json_path: Path | None) -> None:
    args = arguments("0.6b")
    built, _ = build(args)
    buckets = Buckets(built, ModelSpec.from_args(args), bucket_bytes)
    ways: dict[str, Callable[[], float]] = {
        "memcpy": buckets.memcpy,
        "pack the bucket": buckets.pack,
        "map and read the bucket": buckets.read,
        "whole way": buckets.whole_way,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, run in ways.items():
            times[way].append(run())
    buckets.close()
    print(f"\n0.6B shape, {buckets.num_bytes / 1e9:.2f} GB in buckets of {bucket_bytes // MIB} MiB, one core each")
    peer = statistics.median(times["memcpy"][1:])
    ratios = {}
    for way, taken in times.items():
        median = statistics.median(taken[1:])
        if way != "memcpy":
            ratios[f"{way}: speed / memcpy"] = peer / median
        print(f"{way:26} {buckets.num_bytes / median / 1e9:6.1f} GB/s  {peer / median:5.2f} of memcpy")
    print(f"the first packing, into untouched memory: {times['pack the bucket'][0]:.2f} s")
    write_ratios(json_path, ratios)


def build(args: Arguments) -> tuple[nn.Module, parallel.ParallelState]:
    """A Megatron model of random weights in a world of one rank."""
    state = parallel.initialize(args, rank=0, world_size=1, local_rank=0, init_method=torch.distributed.HashStore())
    return model_builder.build_model(args, state), state


def write_folder(folder: Path, args: Arguments, export: Callable[[], Iterator[tuple[str, Tensor]]]) -> Path:
    """The model as a Hugging Face folder."""
    folder.mkdir()
    shards = plan_shards(TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in export())
    with ShardWriter(folder, shards) as writer:
        for name, tensor in export():
            writer.write(name, tensor)
    (folder / "config.json").write_text(json.dumps(hf_config(args)))
    return folder


class Memory:
    """Peak resident bytes of processes above the initial ones; shared pages count for each process."""

    def __init__(self, pids: list[int]) -> None:
        self._before = {pid: self._read(pid, "VmRSS") for pid in pids}
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts from here

    def peak(self) -> int:
        return sum(max(self._read(pid, "VmHWM") - before, 0) for pid, before in self._before.items())

    @staticmethod
    def _read(pid: int, field: str) -> int:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def below(pid: int) -> list[int]:
    """All processes below `pid`."""
    children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [deeper for child in children for deeper in below(child)]


def measure_weight_updates(name: str, rounds: int, bucket_bytes: int) -> None:
    args = arguments(name)
    spec = ModelSpec.from_args(args)
    built, state = build(args)
    own = int(Path("/proc/self").resolve().name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_folder(Path(temporary) / "hf", args, lambda: iter_hf_tensors(built, spec, FAMILY))
        options = {"skip_tokenizer_init": True, "max_total_tokens": 2048, "dtype": "bfloat16"}
        server = ServerProcess(folder, log_path=Path(temporary) / "log", options=options)
        try:
            server.start()
            server.wait_ready(READY_S)
            print(f"\n{name} shape into one SGLang server, buckets of {bucket_bytes // MIB} MiB")
            print("transport          first  median of later   GB/s   peak here   peak there   proof of equality")
            source, engine = ModelSource(spec, FAMILY, state), EngineEndpoint(server.url, [0])
            for transport, way in TRANSPORTS.items():
                more = (Path(temporary) / "updates",) if way == "disk" else ()
                updater = getattr(WeightUpdater, way)(source, [engine], *more, bucket_bytes=bucket_bytes)
                memory, there = Memory([own]), Memory(below(server.pid))
                reports = [updater.update_weights(built, version=f"{way} {n}") for n in range(1 + rounds)]
                peaks = memory.peak() / MIB, there.peak() / MIB
                checked = updater.update_weights(built, version=f"{way} checked", check_equal=True)
                updater.close()
                later = statistics.median(report.seconds for report in reports[1:])
                print(
                    f"{transport:16} {reports[0].seconds:6.2f} s {later:13.3f} s {reports[0].bytes / later / 1e9:8.2f}"
                    f" {peaks[0]:7.0f} MiB {peaks[1]:8.0f} MiB {checked.check_seconds:14.2f} s"
                )
        finally:
            server.stop()


def measure(part: str, rounds: int, bucket_bytes: int, json_path: Path | None) -> None:
    """One part, in a separate process, so that its memory does not affect the next part."""
    torch.set_num_threads(1)
    if part == "buckets":
        measure_buckets(rounds, bucket_bytes, json_path)
    else:
        measure_weight_updates(part, rounds, bucket_bytes)
    parallel.shutdown()


def main() -> None:
    """Measures and prints each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default="buckets,tiny,0.6b")
    parser.add_argument("--bucket-mib", type=int, default=128)
    add_json_option(parser)  # of the part `buckets`
    chosen = parser.parse_args()
    for part in chosen.parts.split(","):
        process = multiprocessing.get_context("spawn").Process(
            target=measure, args=(part, chosen.rounds, chosen.bucket_mib * MIB, chosen.json)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{part} ended with {process.exitcode}")


if __name__ == "__main__":
    main()
