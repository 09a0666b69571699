"""Memory: buckets shared by two processes, offload of the trainer's memory, log-probabilities without logits.

The device and all sizes are parameters: the same code runs on the CPU at toy size.
"""

from __future__ import annotations

import base64
import dataclasses
import multiprocessing
import pickle
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from slimrl.algorithms.log_probs import output_log_probs
from slimrl.weights.update.buckets import Bucket, Entry
from slimrl.weights.update.shared_memory import CudaSharedBuffer, HostSharedBuffer
from slimrl.weights.update.transport_tensor import serialize
from tools.gpu_check.checks.machine import synchronize
from tools.gpu_check.record import Record, Skip

GB, GIB = 1e9, 2**30
ANSWER_S = 120.0
DEVICE_SHARE, HOST_SHARE = 0.8, 0.7  # of the free memory; the host has one pinned copy
LEAST_BYTES = 2**20
PIECE_BYTES = 2**28
SLACK_MIB = 64  # allocator blocks used for random numbers
BESIDE_LOGITS = 0.1  # of the logits' bytes, in addition to the gradients: the bound of tests/gpu/test_memory.py


# -- buckets between two processes -------------------------------------------------------------------------------------


def shared_buckets(record: Record, device: str, bucket_bytes: int, buckets: int) -> None:
    """Each bucket has random bytes that the receiver can regenerate from the seed, to compare all of them."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive, args=(theirs, device, bucket_bytes), daemon=True)
    receiver.start()
    theirs.close()
    answer(ours, receiver)
    sender = HostSharedBuffer() if device == "cpu" else CudaSharedBuffer(torch.device(device, 0))
    seconds, equal = [], 0
    for seed in range(buckets):
        flat = sender.take(bucket_bytes)
        flat.copy_(random_bytes(seed, bucket_bytes, device))
        entry = Entry("bytes", (bucket_bytes,), torch.uint8, 0, bucket_bytes)
        ours.send((seed, serialize(Bucket(flat, (entry,), last=True), [sender.reference()])))
        took, same = answer(ours, receiver)
        seconds.append(took)
        equal += same
        del flat
        sender.release()
    ours.send(None)
    receiver.join(ANSWER_S)
    sender.close()
    record.figure("buckets equal bit for bit", equal, f"of {buckets}", at_least=buckets)
    record.figure("open and copy", bucket_bytes / min(seconds) / GB, "GB/s")
    record.figure("open and copy, the first time", bucket_bytes / seconds[0] / GB, "GB/s")
    record.figure("bucket", bucket_bytes / 2**20, "MiB")


def answer(connection: Connection, receiver: BaseProcess) -> Any:
    """The receiver's next message. Raises RuntimeError if it exited, TimeoutError if it sends nothing."""
    if not connection.poll(ANSWER_S):
        raise TimeoutError(f"the receiving process did not answer within {ANSWER_S:g} s")
    try:
        return connection.recv()
    except EOFError:
        receiver.join(ANSWER_S)
        raise RuntimeError(
            f"the receiving process exited with code {receiver.exitcode}; its error is above in the log"
        ) from None


def receive(connection: Connection, device: str, bucket_bytes: int) -> None:
    """The receiving process: sends (seconds to open and copy, whether every byte is right) of each bucket."""
    own = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
    synchronize(device)
    connection.send(None)
    while (message := connection.recv()) is not None:
        seed, payload = message
        started = time.perf_counter()
        opened = _open(payload)
        own.copy_(opened["flattened_tensor"][:bucket_bytes])
        synchronize(device)
        seconds = time.perf_counter() - started
        del opened  # so that the sender can reuse the memory
        connection.send((seconds, torch.equal(own, random_bytes(seed, bucket_bytes, device))))


def _open(payload: str) -> dict[str, Any]:
    """Unpickles a bucket. Its GPU is given by UUID, which SGLang's processes translate and torch does not."""
    from torch.multiprocessing import reductions

    numbers = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    rebuild = reductions.rebuild_cuda_tensor

    def rebuild_by_uuid(*arguments: Any) -> Tensor:
        return rebuild(*(numbers.get(value, value) if isinstance(value, str) else value for value in arguments))

    reductions.rebuild_cuda_tensor = rebuild_by_uuid
    try:
        return pickle.loads(base64.b64decode(payload))
    finally:
        reductions.rebuild_cuda_tensor = rebuild


def random_bytes(seed: int, count: int, device: str) -> Tensor:
    """The same in every process on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=device, generator=generator)


# -- training's memory -------------------------------------------------------------------------------------------------


def offload(record: Record, device: str, most_bytes: float) -> None:
    """Weights, gradients and optimizer state in the proportions of bf16 training (2 : 4 : 12 bytes per weight)."""
    from slimrl.megatron.offload import TrainingMemory
    from slimrl.megatron.parallel import Communicators

    size = int(min(most_bytes, DEVICE_SHARE * free_bytes(device), HOST_SHARE * free_host_bytes()))
    if size < LEAST_BYTES:
        raise Skip(f"only {size / 2**20:.1f} MiB fit")
    target = torch.device(device, 0) if device == "cuda" else torch.device(device)
    unit = size // 18
    shares: dict[Literal["weights", "gradients", "optimizer"], int] = {"weights": 2, "gradients": 4, "optimizer": 12}
    held = {part: [torch.empty(share * unit, dtype=torch.uint8, device=target)] for part, share in shares.items()}
    seeds: dict[Literal["weights", "gradients", "optimizer"], int] = {"weights": 0, "optimizer": 1000}
    for part, seed in seeds.items():
        fill(held[part][0], seed)
    resident = reserved_bytes(device)
    memory = TrainingMemory(lambda: held, target, Communicators([]))
    seconds = {}
    for turn in ("first", "later"):
        seconds[f"{turn} offload"], gone = timed(device, memory.sleep)
        left = reserved_bytes(device)
        seconds[f"{turn} reload"], _ = timed(device, memory.wake)
    moved = 14 * unit  # gradients are freed, not copied
    record.figure("moved", moved / GB, "GB")
    record.figure("given up", sum(gone.values()) / GB, "GB", at_least=18 * unit / GB)
    if device == "cuda":
        record.figure("left on the GPU", left / 2**20, "MiB", at_most=(resident - 18 * unit) / 2**20 + SLACK_MIB)
    for name, took in seconds.items():  # the first time allocates pinned memory, which is slow
        record.figure(name, moved / took / GB, "GB/s")
    same = all(holds(held[part][0], seed) for part, seed in seeds.items())
    record.figure("every byte came back", same)
    record.require(same, "weights or optimizer state were restored with different bytes")


def fill(values: Tensor, seed: int) -> None:
    """Random bytes, generated piece by piece, because two copies would not fit."""
    for number, piece in enumerate(values.split(PIECE_BYTES)):
        piece.copy_(random_bytes(seed + number, piece.numel(), values.device.type))


def holds(values: Tensor, seed: int) -> bool:
    """Whether every byte is as `fill` left it."""
    pieces = enumerate(values.split(PIECE_BYTES))
    return all(torch.equal(piece, random_bytes(seed + n, piece.numel(), values.device.type)) for n, piece in pieces)


def timed(device: str, call: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds until the work is done on the device, result)."""
    synchronize(device)
    started = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - started, result


def free_bytes(device: str) -> int:
    """Of the device's memory; on the CPU of the host's."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else free_host_bytes()


def free_host_bytes() -> int:
    """Host memory available to processes: that of the machine, or of its container if that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        free = min(free, max(int(text) - int(used.read_text()), 0))
    return free


def reserved_bytes(device: str) -> int:
    """Bytes reserved by torch's allocator; 0 on the CPU."""
    return torch.cuda.memory_reserved() if device == "cuda" else 0


# -- log-probabilities -------------------------------------------------------------------------------------------------


def log_probs(record: Record, device: str, tokens: int, width: int, vocab: int, rounds: int) -> None:
    """Forward and backward of the output layer; the first rows against float64 of the same bf16 inputs."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(vocab, width, device=device) / width**0.5).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)
    truth, largest = true_log_probs(hidden.detach()[:128], weight.detach(), targets[:128])
    passes = [forward_and_backward(device, hidden, weight, targets) for _ in range(1 + rounds)][1:]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated()
        passes.append(forward_and_backward(device, hidden, weight, targets))
        peak = torch.cuda.max_memory_allocated() - resident
        # both gradients, that of the hidden states in float32 first
        kept = weight.nbytes + hidden.numel() * (4 + 2 * hidden.element_size())
        record.figure("peak memory", peak / GIB, "GiB")
        logit_bytes = tokens * vocab * hidden.element_size()
        record.figure("beside gradients, of the logits' size", (peak - kept) / logit_bytes, at_most=BESIDE_LOGITS)
    forward, backward = min(one.forward_s for one in passes), min(one.backward_s for one in passes)
    record.figure("forward", 1e3 * forward, "ms")
    record.figure("backward", 1e3 * backward, "ms")
    # one matrix product forward; three backward: the logits again, and both gradients
    record.figure("speed of both", 4 * 2 * tokens * width * vocab / (forward + backward) / 1e12, "TFLOP/s")
    # a bf16 logit is off by 2^-9 of itself at most, and so are the target's own and the sum over all of them
    error = float((passes[0].scores[: len(truth)].double() - truth).abs().max())
    record.figure("largest error", error, at_most=largest * 2**-8)
    record.require(all(one.finite for one in passes), "a gradient is not finite")


@dataclasses.dataclass(frozen=True)
class Pass:
    """Seconds of a forward and a backward pass, float32 log-probabilities [tokens], whether gradients are finite."""

    forward_s: float
    backward_s: float
    scores: Tensor
    finite: bool


def forward_and_backward(device: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> Pass:
    """One pass each; the gradients are given up."""
    vocab = weight.shape[0]
    forward_s, (scores, entropy) = timed(
        device, lambda: output_log_probs(hidden, weight, targets, vocab_size=vocab, group=None)
    )
    backward_s, gradients = timed(device, lambda: torch.autograd.grad((scores + entropy).sum(), (hidden, weight)))
    # a sum needs no additional memory, and is not finite if any gradient is not
    finite = all(bool(gradient.sum(dtype=torch.float32).isfinite()) for gradient in gradients)
    return Pass(forward_s, backward_s, scores.detach(), finite)


def true_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """(float64 log-probabilities, the largest |logit|) of the same numbers."""
    logits = hidden.double() @ weight.double().t()
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0], float(logits.abs().max())
