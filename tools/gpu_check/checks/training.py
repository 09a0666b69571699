"""Training: toys in bf16 against float64, and one real step with its speed, memory and host synchronisations.

The device and all sizes are parameters: the same code runs on the CPU at toy size.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slimrl.arguments import Arguments
from slimrl.arguments.memory import StageMemory, training_memory
from slimrl.megatron.config import transformer_impl
from tools.gpu_check.checks.memory import free_bytes
from tools.gpu_check.models import RandomTrainer, arguments, rollout_of, scheduled
from tools.gpu_check.record import Record, Skip
from tools.gpu_check.speeds import peak_flops

GIB = 2**30
ROOM = 0.92  # of the free memory: allocator fragmentation and the CUDA context are not in the plan
SHOWN_PLACES = 5
STANDING_TOLERANCE = 0.01  # buffers are padded to equal shards
KINDS = ("parameters", "gradients", "optimizer", "activations")
STEP_FLAGS = (
    "--bf16", "--use-distributed-optimizer", "--lr", "1e-6", "--use-dynamic-batch-size",
    "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1",
    "--compute-old-log-probs", "always",  # its time is a figure of the check
)  # fmt: skip
# operations in which the host waits for a value from the device
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select", "aten::equal")
SYNC_WARNING = "called a synchronizing CUDA operation"  # by torch.cuda.set_sync_debug_mode
COPIES = ("aten::_to_copy", "aten::copy_")


# -- toys --------------------------------------------------------------------------------------------------------------


def toy(record: Record, kind: str, implementation: str, device: str) -> None:
    """One step of a "dense", "MoE" or "MLA" toy, compared with transformers and autograd in float64 on the CPU.

    `device` is the expected device; the trainer detects the device itself.
    """
    from tests.megatron import layouts, ranks

    require_device(device)
    torch.set_num_threads(min(torch.get_num_threads(), 4))  # the models are too small for more
    with tempfile.TemporaryDirectory() as folder:
        models = layouts.Models(Path(folder))
        layout = layouts.LAYOUTS["1 rank"]
        args = models.args(layout, kind, layouts.BF16)
        args.transformer_impl = implementation
        result = ranks.train_once(0, 1, f"file://{folder}/store", args, models.rollout)
        found = layouts.differences(args, result, models.truth(kind, layout.layers, layouts.BF16))
    for name, value, bound in zip(BOUNDED, (found.loss, found.grad_norm, found.weights, found.gradients),
                                  bounds(kind), strict=True):  # fmt: skip
        record.figure(f"{name}, relative error", value, at_most=bound)


BOUNDED = ("loss", "gradient norm", "weights", "gradient")


def bounds(kind: str) -> tuple[float, float, float, float]:
    """The bounds of `BOUNDED`: those of `layouts.within_bf16`, see docs/parallelism.md."""
    from tests.megatron import layouts

    return 2**-5, 2**-5, 0.01, layouts.BF16_GRADIENT[kind]


def require_device(device: str) -> None:
    """Raises RuntimeError if the trainer would run on another device."""
    if torch.cuda.is_available() != (device == "cuda"):
        raise RuntimeError(f"the check is for {device}, and torch.cuda.is_available() is {torch.cuda.is_available()}")


# -- a real step -------------------------------------------------------------------------------------------------------


def step(
    record: Record,
    device: str,
    models: Sequence[str],
    samples: int,
    length: int,
    changes: Sequence[str] = (),
    rounds: int = 2,
) -> None:
    """Trains the first of `models` (of scripts/models) that fits on `samples` random sequences of `length` tokens.

    `changes` are flags that replace those of the model.
    """
    require_device(device)
    name, args, planned = largest_that_fits(models, [*STEP_FLAGS, "--max-tokens-per-gpu", str(4 * length), *changes],
                                            free_bytes(device))  # fmt: skip
    record.figure("model", name)
    record.figure("layers", transformer_impl(args))
    trainer = RandomTrainer(args)
    rollout = scheduled(args, random_rollout(args, samples, length))
    losses = [trainer.train(0, rollout)[0]["loss"]]
    noted = trainer.memory_report.take()
    reports = []
    for number in range(1, rounds + 1):
        losses.append(trainer.train(number, rollout)[0]["loss"])
        reports.append(trainer.rollout_metrics)
    best = max(reports, key=lambda report: report["perf/actor_train_tok_per_s"])
    record.figure("optimizer step", best["perf/actor_train_tok_per_s"], "tokens/s")
    speed_figures(record, best["perf/actor_train_tflops"], device)
    record.figure("log-probabilities before it", 1e3 * best["perf/log_probs_time"], "ms")
    memory_figures(record, noted, planned, device)
    sync_figures(record, trainer, rollout, device)
    record.require(all(map(finite, losses)), f"the losses are {losses}")
    trainer.close()


def finite(value: float) -> bool:
    """Neither infinite nor NaN."""
    return value - value == 0


def largest_that_fits(models: Sequence[str], flags: Sequence[str], room: int) -> tuple[str, Arguments, StageMemory]:
    """(name, flags, plan) of the first model whose plan fits into `ROOM` of `room` bytes. Raises Skip if none does."""
    for name in models:
        args = arguments(name, *flags)
        (planned,) = training_memory(args)
        if planned.total <= ROOM * room:
            return name, args, planned
    raise Skip(f"{room / GIB:.1f} GiB are free, and {name}, the smallest, needs {planned.total / GIB:.1f} GiB")


def random_rollout(args: Arguments, samples: int, length: int) -> Any:
    """Sequences of random tokens; one eighth of each is the prompt."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, args.vocab_size, (samples, length), generator=generator).tolist()
    prompt = max(length // 8, 1)
    likely = -float(torch.tensor(float(args.vocab_size)).log())
    return rollout_of(tokens, prompt, [[likely] * (length - prompt)] * samples)


def speed_figures(record: Record, tflops: float, device: str) -> None:
    """The fraction of the GPU's peak that the model's operations use (forward and backward, no recomputation)."""
    record.figure("model operations", tflops, "TFLOP/s")
    peak = peak_flops(torch.cuda.get_device_name()) if device == "cuda" else None
    if peak is not None:
        record.figure("MFU", 100 * tflops / peak, "%")


def memory_figures(record: Record, noted: dict[str, float], planned: StageMemory, device: str) -> None:
    """Measured and planned bytes by kind; persistent kinds must be as planned."""
    for kind in KINDS:
        measured, plan = noted[f"memory_{kind}"], noted[f"planned_memory_{kind}"]
        record.figure(f"{kind}", measured / GIB, "GiB")
        record.figure(f"{kind}, planned", plan / GIB, "GiB")
        if kind != "activations" and abs(measured / plan - 1) > STANDING_TOLERANCE:
            record.complain_about(f"{kind} take {measured:.0f} bytes instead of the planned {plan:.0f}")
    if device == "cuda":
        record.figure("peak of the allocator", torch.cuda.max_memory_reserved() / GIB, "GiB")
        record.figure("peak, planned", planned.total / GIB, "GiB")


def sync_figures(record: Record, trainer: RandomTrainer, rollout: Any, device: str) -> None:
    """How often one call of `train` (log-probabilities, step, metrics) makes the host wait for the device."""
    micro_batches = len(rollout.micro_batches[0])
    record.figure("micro-batches", micro_batches)
    if device == "cuda":
        with counted_syncs() as syncs:
            trainer.train(98, rollout)
        record.figure("host synchronisations", len(syncs))
        record.figure("host synchronisations per micro-batch", len(syncs) / micro_batches)
        for line, count in Counter(syncs).most_common(SHOWN_PLACES):
            place, _, number = line.rpartition("site-packages/")[2].rpartition(":")
            record.figure(f"of them at {place}:{number}", count)
    with Reads(device) as reads:  # not around the other: it would be the place of every synchronisation
        trainer.train(99, rollout)
    record.figure("numbers read by the host", sum(reads.counts.values()))


class Reads(TorchDispatchMode):
    """`counts`: how often each operation ran with which the host reads values from a `device` ("cuda", "cpu")."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.name().split(".")[0]
        on_device = any(arg.device.type == self._device for arg in args if isinstance(arg, torch.Tensor))
        copied = name in COPIES and self._device != "cpu" and result.device.type == "cpu"
        if on_device and (name in READS or copied):
            self.counts[name] += 1
        return result


@contextlib.contextmanager
def counted_syncs() -> Iterator[list[str]]:
    """Each place ("file:line") where the host waited for the GPU within the block, as torch reports it. CUDA only."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found += [f"{one.filename}:{one.lineno}" for one in caught if SYNC_WARNING in str(one.message)]
