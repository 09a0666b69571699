"""Speed of weight updates: shared memory compared with memcpy, and whole weight updates into a real server.

    python benchmarks/weight_update.py [--rounds 5] [--parts buckets,tiny,0.6b] [--bucket-mib 128]

`buckets`: bytes per second of the 0.6B shape's weights, on one core each, in interleaved rounds: memcpy from one tensor
into another; packed from a Megatron model into the shared bucket; read from a bucket by another process, which maps it
again as a server does; and the whole way into the other process's tensors: "packed" with every tensor in a bucket, of
which one is packed while the other is read, and "where they are" as a trainer does whose weights are in shared memory.
Target of the last: 0.6 of memcpy or more. `tiny`, `0.6b`: seconds of a weight update into one real SGLang server (bf16,
random weights), for each transport, in interleaved rounds with its limit: memcpy of the same bytes, a bare gloo
broadcast to one process in buckets of the same size, and a plain file, written and read. Target of the broadcast: 0.5
of its limit or more. Also the peak memory above that before the weight update, of this process and of the server, and
the cost of the full check. Needs 6 GiB of memory and of temporary disk for the 0.6B shape.
"""

from __future__ import annotations

import argparse
import base64
import datetime
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
import torch.distributed as dist
from ratios import add_json_option, write_ratios
from torch import Tensor, nn

from slimrl.arguments import Arguments
from slimrl.engines.sglang.server import ServerProcess
from slimrl.megatron import parallel
from slimrl.megatron.model import model_builder
from slimrl.models.families import family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.hf_checkpoint_writer import ShardWriter, TensorSpec, plan_shards
from slimrl.weights.update.buckets import Bucket, BucketSpace, iter_buckets, never
from slimrl.weights.update.export import iter_hf_tensors
from slimrl.weights.update.shared_memory import (
    HostSharedBuffer,
    SharedDoubleBuffer,
    shared_copies,
    shared_file,
)
from slimrl.weights.update.topology import EngineEndpoint
from slimrl.weights.update.transport_distributed import join_group, listening_store
from slimrl.weights.update.transport_tensor import serialize, serialize_named
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
LOOPBACK = "127.0.0.1"
WAIT = datetime.timedelta(seconds=READY_S)
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
        if isinstance(opened, dict):
            flat, entries = opened["flattened_tensor"], opened["metadata"]
            opened = [(e.name, flat[e.start_idx : e.end_idx].view(e.dtype).view(e.shape)) for e in entries]
        for name, tensor in opened:
            own[name].copy_(tensor)
        del opened, tensor
        flat = None
        connection.send(time.perf_counter() - started)


class Buckets:
    """The ways of one model's bytes, each as seconds per round."""

    def __init__(self, built: nn.Module, spec: ModelSpec, bucket_bytes: int) -> None:
        share(built)
        self._space = BucketSpace(torch.device("cpu"))
        self._export = lambda: iter_hf_tensors(built, spec, FAMILY, space=self._space)
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
        for _ in self._buckets():
            pass
        self._buffer.release()
        return time.perf_counter() - started

    def read(self) -> float:
        seconds = 0.0
        for bucket in self._buckets():
            self._connection.send(serialize(bucket, [self._buffer.reference()]))
            seconds += self._connection.recv()
        self._buffer.release()
        return seconds

    def packed(self) -> float:
        return self._whole_way(lambda bucket: serialize(bucket, [self._buffer.reference()]), never)

    def where_they_are(self) -> float:
        opens = lambda tensor: shared_file(tensor) is not None  # noqa: E731
        return self._whole_way(lambda bucket: serialize_named(bucket, self._buffer.reference()), opens)

    def _whole_way(self, serialized: Callable[[Bucket], str], opens: Callable[[Tensor], bool]) -> float:
        started, under_way = time.perf_counter(), False
        for bucket in self._buckets(opens):
            if under_way:
                self._connection.recv()
            self._connection.send(serialized(bucket))
            under_way = True
        self._connection.recv()
        self._buffer.release()
        return time.perf_counter() - started

    def _buckets(self, opens: Callable[[Tensor], bool] = never) -> Iterator[Bucket]:
        return iter_buckets(self._export(), self._bytes, self._buffer, space=self._space, opens=opens)

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
        "whole way, packed": buckets.packed,
        "whole way, where they are": buckets.where_they_are,
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


def share(model: nn.Module) -> None:
    """Moves the weights into shared memory, as `megatron.data_parallel.share_weights` does for a colocated trainer."""
    parameters = list(model.parameters())
    for parameter, copy in zip(parameters, shared_copies(parameters), strict=True):
        parameter.data = copy


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


def receive_broadcasts(connection: Connection, port: int, size: int) -> None:
    """The other end of `Limits.broadcast`: receives as many broadcasts of `size` bytes as it is told."""
    torch.set_num_threads(1)
    store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=WAIT)
    group = join_group(store, "gloo", "limit", rank=1, world_size=2, timeout=WAIT)
    flat = torch.zeros(size, dtype=torch.uint8)
    while (count := connection.recv()) is not None:
        for _ in range(count):
            group.broadcast([flat], dist.BroadcastOptions()).wait()
        connection.send(None)


class Limits:
    """What each transport cannot exceed, as seconds for `num_bytes`."""

    def __init__(self, num_bytes: int, bucket_bytes: int, folder: Path) -> None:
        self._source = torch.ones(num_bytes, dtype=torch.uint8)
        self._target = torch.zeros(num_bytes, dtype=torch.uint8)
        self._folder = folder
        self._size = min(bucket_bytes, num_bytes)
        store = listening_store(LOOPBACK, WAIT, world_size=2)
        self._connection, theirs = multiprocessing.Pipe()
        target, context = receive_broadcasts, multiprocessing.get_context("spawn")
        self._process = context.Process(target=target, args=(theirs, store.port, self._size), daemon=True)
        self._process.start()
        self._group = join_group(store, "gloo", "limit", rank=0, world_size=2, timeout=WAIT)

    def copy(self) -> float:
        started = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - started

    def broadcast(self) -> float:
        started = time.perf_counter()
        count = -(-self._source.numel() // self._size)
        self._connection.send(count)
        for _ in range(count):
            self._group.broadcast([self._source[: self._size]], dist.BroadcastOptions()).wait()
        self._connection.recv()
        return (time.perf_counter() - started) * self._source.numel() / (count * self._size)

    def file(self) -> float:
        started = time.perf_counter()
        path = self._folder / "plain"
        path.write_bytes(self._source.numpy().data)
        with path.open("rb", buffering=0) as file:
            view, done = memoryview(self._target.numpy()), 0
            while done < len(view):
                done += file.readinto(view[done:])
        path.unlink()
        return time.perf_counter() - started

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


def measure_weight_updates(name: str, rounds: int, bucket_bytes: int) -> None:
    args = arguments(name)
    spec = ModelSpec.from_args(args)
    built, state = build(args)
    share(built)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_folder(Path(temporary) / "hf", args, lambda: iter_hf_tensors(built, spec, FAMILY))
        options = {"skip_tokenizer_init": True, "max_total_tokens": 2048, "dtype": "bfloat16"}
        server = ServerProcess(folder, log_path=Path(temporary) / "log", options=options)
        try:
            server.start()
            server.wait_ready(READY_S)
            time_transports(
                name, built, ModelSource(spec, FAMILY, state), server, Path(temporary), rounds, bucket_bytes
            )
        finally:
            server.stop()


def time_transports(
    name: str, built: nn.Module, source: ModelSource, server: ServerProcess, folder: Path, rounds: int, size: int
) -> None:
    """Prints a line for each transport; its rounds and those of its limit are interleaved."""
    print(f"\n{name} shape into one SGLang server, buckets of {size // MIB} MiB")
    print("transport          first  median of later   GB/s  of its limit   peak here   peak there   proof of equality")
    own, engine = int(Path("/proc/self").resolve().name), EngineEndpoint(server.url, [0])
    limits = Limits(sum(tensor.nbytes for _, tensor in iter_hf_tensors(built, source.spec, FAMILY)), size, folder)
    for transport, way in TRANSPORTS.items():
        more = (folder / "updates",) if way == "disk" else ()
        updater = getattr(WeightUpdater, way)(source, [engine], *more, bucket_bytes=size)
        limit = {"colocated": limits.copy, "split": limits.broadcast, "disk": limits.file}[way]
        limit()
        memory, there = Memory([own]), Memory(below(server.pid))
        first = updater.update_weights(built, version=f"{way} first")
        peaks = memory.peak() / MIB, there.peak() / MIB
        times, bounds, checks = [], [], []
        for number in range(rounds):
            bounds.append(limit())
            times.append(updater.update_weights(built, version=f"{way} {number}").seconds)
            checks.append(updater.update_weights(built, version=f"{way} checked", check_equal=True).check_seconds)
        updater.close()
        later = statistics.median(times)
        print(
            f"{transport:16} {first.seconds:6.2f} s {later:13.3f} s {first.bytes / later / 1e9:8.2f}"
            f" {statistics.median(bounds) / later:12.2f} {peaks[0]:9.0f} MiB {peaks[1]:8.0f} MiB"
            f" {statistics.median(checks):14.2f} s"
        )
    limits.close()


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
