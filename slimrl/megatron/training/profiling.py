"""What a training rank uses: bytes by kind compared with the estimate of `--dry-run`, allocations, profiler traces.

Persistent memory (weights, gradients, optimizer state, also of a critic in the same ranks, and the weights of reference
and teacher in host memory) is exact. Activations are those of the first optimizer step: on a GPU the allocator's peak
above the persistent memory, on a CPU the most that autograd kept for the backward pass at one time, because process
memory is not informative there. Later steps are measured on a GPU only, where it is free.

`--record-memory-history` (CUDA only) records every allocation with its stack in
`<--memory-snapshot-dir>/rank<R>-<--memory-snapshot-path>`, for https://docs.pytorch.org/memory_viz. The file is written
after `--memory-snapshot-num-steps` rollouts or else when training ends, and when the GPU runs out of memory.

`--use-pytorch-profiler` writes one Chrome trace per profiled part,
`<run-dir>/profile/rank<R>-rollout<N>-<part>.json.gz`, for https://ui.perfetto.dev. Other ranks and rollouts have no
overhead.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from slimrl.arguments.flags.logging import ProfilingArguments
from slimrl.arguments.memory import StageMemory
from slimrl.megatron.model.micro_batch import MicroBatch
from slimrl.megatron.offload import local_part, persistent_tensors
from slimrl.megatron.parallel import ParallelState
from slimrl.processes.process_info import gib

logger = logging.getLogger(__name__)

KINDS = ("parameters", "gradients", "optimizer", "activations")
OF_CRITIC = ("critic", "critic_gradients")  # its weights and optimizer state, its gradients
GATHERED = "gathered"  # by Megatron-FSDP, outside of a model's own passes
HOST_MODELS = "host_models"  # in whole chunks of `HostMemory`


class Trained(Protocol):
    """A model in training."""

    @property
    def wrapped(self) -> Sequence[nn.Module]:
        """Its stages in Megatron's DDP or Megatron-FSDP."""

    @property
    def optimizer(self) -> MegatronOptimizer:
        """Of all stages."""


class HostModel(Protocol):
    """A model in host memory."""

    @property
    def host_bytes(self) -> int:
        """Allocated bytes."""


class MemoryReport:
    """Measures one rank's optimizer steps and logs the result once, with the planned values."""

    def __init__(
        self,
        plan: Callable[[int], Sequence[StageMemory]],
        model: Trained,
        parallel: ParallelState,
        *,
        critic: Trained | None = None,
        host_models: Sequence[HostModel] = (),
    ) -> None:
        """Measures the steps of `model`; `critic` is trained by the same ranks.

        `plan` returns the memory of each pipeline stage for a micro-batch of the given number of tokens per GPU.
        """
        self._plan, self._model, self._critic, self._host_models = plan, model, critic, host_models
        self._kinds = (*KINDS, *(OF_CRITIC if critic is not None else ()), *([HOST_MODELS] if host_models else ()))
        self._parallel = parallel
        self._measured_before = False
        self._noted: dict[str, float] = {}
        self._activations: int | None = None  # of the last step, where it was measured

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context manager around the forward and backward passes of one optimizer step."""
        self._activations = None
        device = self._parallel.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            yield
            self._activations = torch.cuda.max_memory_allocated(device) - before
        elif not self._measured_before:
            weights = {_address(tensor) for stage in self._model.wrapped for tensor in stage.parameters()}
            with KeptForBackward(weights) as kept:
                yield
            self._activations = kept.peak
        else:
            yield

    def note(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Records the last step, which had these `micro_batches`, and logs the first; collective."""
        if self._activations is None:
            return
        if self._measured_before:
            name = "memory_activations"
            self._noted[name] = max(self._noted.get(name, 0.0), float(self._largest([self._activations])[0]))
            return
        self._measured_before = True
        found = self._standing() | {"activations": self._activations}
        own = {kind: found[kind] for kind in self._kinds}
        tokens = max(micro_batch.tokens.numel() for micro_batch in micro_batches)
        planned = self._planned(tokens)[self._parallel.pp_rank]
        logger.info("memory of rank %d: %s", self._parallel.rank, sentence(own, planned, tokens))
        *sizes, tokens = self._largest([*(own[kind] for kind in self._kinds), tokens])
        most, stages = dict(zip(self._kinds, sizes, strict=True)), self._planned(tokens)
        planned = {kind: max(stage[kind] for stage in stages) for kind in self._kinds}
        if self._parallel.rank == 0 and self._parallel.world_size > 1:
            logger.info("maximum over ranks: %s", sentence(most, planned, tokens))
        self._noted = _named(most, "memory") | _named(planned, "planned_memory")

    def take(self) -> dict[str, float]:
        """Values recorded since the last call, equal on all ranks: the maximum over ranks of the bytes of each kind.

        The standing memory and the plan are told once. Apart from the steps' own metrics, because it depends on where a
        process began: a resumed run has the same metrics as one that was not interrupted.
        """
        noted, self._noted = self._noted, {}
        return noted

    def _planned(self, tokens: int) -> list[dict[str, int]]:
        """Of each pipeline stage; on a GPU activations are the peak, elsewhere what is kept for the backward pass."""
        on_gpu = self._parallel.device.type == "cuda"
        return [
            {
                "parameters": stage.weights,
                "gradients": stage.gradients,
                "optimizer": stage.optimizer,
                "activations": stage.activations + (max(stage.loss, stage.backward) if on_gpu else 0),
                "critic": stage.critic,
                "critic_gradients": stage.critic_gradients,
                HOST_MODELS: stage.host_models,
            }
            for stage in self._plan(tokens)
        ]

    def _largest(self, values: list[int]) -> list[int]:
        most = torch.tensor(values, dtype=torch.int64, device=self._parallel.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return most.tolist()

    def _standing(self) -> dict[str, int]:
        """Bytes of what this rank holds, by kind: all on its device, but for models in host memory."""
        sizes = {kind: size for kind, size in self._sizes(self._model).items() if kind != GATHERED}
        if self._critic is not None:
            own = self._sizes(self._critic)
            held = own["parameters"] + own[GATHERED] + own["optimizer"]
            sizes |= dict(zip(OF_CRITIC, (held, own["gradients"]), strict=True))
        if self._host_models:
            sizes[HOST_MODELS] = sum(model.host_bytes for model in self._host_models)
        return sizes

    def _sizes(self, model: Trained) -> dict[str, int]:
        """Bytes of one model on this rank's device; shared memory counts once."""
        seen: set[int] = set()
        sizes = {}
        for kind, tensors in _held(model.wrapped, model.optimizer).items():
            sizes[kind] = 0
            for storage in (local_part(tensor).untyped_storage() for tensor in tensors):
                if storage.device == self._parallel.device and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    sizes[kind] += storage.nbytes()
        return sizes


def _held(stages: Sequence[Any], optimizer: MegatronOptimizer) -> dict[str, list[Tensor]]:
    """Every tensor that persists from step to step."""
    held = persistent_tensors(stages, [optimizer])
    sharded = [stage for stage in stages if not isinstance(stage, DistributedDataParallel)]
    gathered = [parameter for stage in sharded for parameter in stage.parameters()]
    return {
        "parameters": held["weights"],
        "gradients": held["gradients"],
        "optimizer": held["optimizer"],
        GATHERED: gathered,
    }


class KeptForBackward(torch.autograd.graph.saved_tensors_hooks):
    """`peak`: the most bytes that autograd's graphs, built inside the block, kept at one time.

    Memory that several operations keep counts once, memory at an address of `ignored` (weights) not at all.
    """

    def __init__(self, ignored: set[int]) -> None:
        super().__init__(self._keep, lambda kept: kept.tensor)
        self.peak = 0
        self._ignored = ignored
        self._kept: dict[int, int] = {}  # address: how many operations keep it
        self._bytes = 0

    def __enter__(self) -> KeptForBackward:  # type: ignore[override]
        super().__enter__()
        return self

    def _keep(self, tensor: Tensor) -> _Kept:
        address, size = _address(tensor), tensor.untyped_storage().nbytes()
        if address in self._ignored or not size:
            return _Kept(tensor, lambda: None)
        self._count(address, 1, size)
        return _Kept(tensor, functools.partial(self._count, address, -1, size))

    def _count(self, address: int, change: int, size: int) -> None:
        before = self._kept.get(address, 0)
        self._kept[address] = before + change
        if not before:
            self._bytes += size
            self.peak = max(self.peak, self._bytes)
        elif not self._kept[address]:
            self._bytes -= size


class _Kept:
    """A tensor in a graph; freed when the graph frees it."""

    def __init__(self, tensor: Tensor, release: Callable[[], None]) -> None:
        self.tensor = tensor
        self._release = release

    def __del__(self) -> None:
        self._release()


def _address(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()


def _named(sizes: dict[str, int], prefix: str) -> dict[str, float]:
    return {f"{prefix}_{kind}": float(size) for kind, size in sizes.items()}


def sentence(sizes: dict[str, int], planned: dict[str, int], tokens: int) -> str:
    """ "parameters 1.20 GiB (planned 1.20 GiB), ...": `tokens` are those of the step's largest micro-batch."""
    parts = [f"{kind.replace('_', ' ')} {gib(size)} (planned {gib(planned[kind])})" for kind, size in sizes.items()]
    return f"{', '.join(parts)} with micro-batches of up to {tokens:,} tokens"


_ENTRIES = 1_000_000


class MemoryHistory:
    """Records with `--record-memory-history`. Call `trained` after each rollout, `close` at the end."""

    def __init__(self, profiling: ProfilingArguments, rank: int) -> None:
        """Raises ValueError if there is no GPU."""
        self._records = profiling.record_memory_history
        self._rollouts_left = profiling.memory_snapshot_num_steps
        self._path = Path(profiling.memory_snapshot_dir) / f"rank{rank}-{profiling.memory_snapshot_path}"
        if not self._records:
            return
        if not torch.cuda.is_available():
            raise ValueError(
                "--record-memory-history records what is allocated on a GPU, and this machine has none: leave it out"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)
        torch._C._cuda_attach_out_of_memory_observer(lambda *_: self._write())  # type: ignore[attr-defined]

    def trained(self) -> None:
        """Counts one more trained rollout."""
        if self._records and self._rollouts_left is not None:
            self._rollouts_left -= 1
            if self._rollouts_left == 0:
                self.close()

    def close(self) -> None:
        """Writes the snapshot unless it is already written, and stops recording."""
        if self._records:
            self._records = False
            self._write()
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self) -> None:
        torch.cuda.memory._dump_snapshot(str(self._path))
        logger.info("wrote the GPU memory snapshot to %s", self._path)


OVERALL, ACTOR, LOG_PROBS = "train_overall", "train_actor", "train_log_probs"


class PartProfiler:
    """`with profiler.part(ACTOR, rollout_id): ...` profiles the block if `--profile-*` select it."""

    def __init__(self, profiling: ProfilingArguments, rank: int, run_dir: str) -> None:
        chosen = profiling.use_pytorch_profiler and rank in profiling.profile_ranks
        self._targets = frozenset(profiling.profile_target) if chosen else frozenset()
        self._rollouts = range(profiling.profile_step_start, profiling.profile_step_end)
        self._rank = rank
        self._folder = Path(run_dir) / "profile"

    @contextlib.contextmanager
    def part(self, target: str, rollout_id: int) -> Iterator[None]:
        """Profiles the block and writes its file at the end. A block that fails writes none."""
        if target not in self._targets or rollout_id not in self._rollouts:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, record_shapes=True, profile_memory=True, with_flops=True) as profiler:
            yield
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{self._rank}-rollout{rollout_id}-{target}.json.gz"
        profiler.export_chrome_trace(str(path))
        logger.info("profiled %s of rollout %d: %s", target, rollout_id, path)
