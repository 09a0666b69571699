"""The reference model: a host copy of its weights, loaded into the training model for one forward pass.

`PrecomputedReference` has the log-probabilities of --precompute-ref-log-probs, which need no pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.arguments.checkpoints import forward_settings
from slimrl.data import reference_log_probs
from slimrl.data.reference_log_probs import ReferenceFolder, ReferenceIdentity, sample_key
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.model.micro_batch import MicroBatch
from slimrl.megatron.offload import HostCopy, HostMemory
from slimrl.megatron.parallel import ParallelState
from slimrl.platform.collective_errors import run_on_rank_zero
from slimrl.weights.adapters import without_adapters

logger = logging.getLogger(__name__)


class ReferenceWeights:
    """This rank's reference weights, in host memory (pinned if there is a GPU)."""

    def __init__(self, stages: Sequence[GPTModel], *, changes: bool = False):
        """Copies the current weights of this rank's `stages`. `changes`: `update` is called (--ref-update-interval)."""
        self._begin([tensor for stage in stages for tensor in _state(stage)])
        self.changes = changes
        self._save(self._reference, self.tensors)

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[Tensor, Tensor]]) -> ReferenceWeights:
        """Reference values in host memory, each with the model's tensor that it replaces."""
        tensors, values = map(list, zip(*pairs, strict=True))
        made = cls.__new__(cls)
        made._begin(tensors)
        made._save(made._reference, values)
        return made

    def _begin(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors  # of the model; each has a reference value
        self._on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._memory = HostMemory(page_locked=self._on_gpu)
        self._reference = HostCopy(tensors, self._memory)
        self._own: HostCopy | None = None  # memory for the model's own weights, allocated by the first swap
        self.changes = False
        self.before_change: Callable[[], None] = lambda: None  # called before the reference changes
        self.loaded = False  # whether the model's own weights are those in the host's memory
        self.restored: torch.cuda.Event | None = None  # after the last swap back
        self.exclusive: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # around the copy of these

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory: of the reference, and twice as much once it has been swapped in."""
        return self._memory.nbytes

    def update(self) -> None:
        """Makes the model's current weights the reference."""
        self.before_change()
        with self.exclusive():
            self._save(self._reference, self.tensors)

    def values(self) -> list[Tensor]:
        """The reference values, in host memory, in the order of `tensors`; copies."""
        return list(map(self.value, range(len(self.tensors))))

    def restore(self, values: Sequence[Tensor]) -> None:
        """Makes what `values` of a rank with the same part of the model returned the reference."""
        self._save(self._reference, list(values))

    def value(self, number: int) -> Tensor:
        """The reference value of `tensors[number]`, in host memory; a copy."""
        made = torch.empty(self.tensors[number].shape, dtype=self.tensors[number].dtype)
        self._reference.read(number, made)
        return made

    @contextlib.contextmanager
    def loaded_weights(self) -> Iterator[None]:
        """Within the block the model has the reference weights; afterwards its own are restored, bit for bit."""
        if self._own is None:
            self._own = HostCopy(self.tensors, self._memory)
        with self.exclusive():
            self._save(self._own, self.tensors)
            self.loaded = True
        self._reference.fill(self.tensors)
        try:
            yield
        finally:
            self._own.fill(self.tensors)
            if self._on_gpu:
                self.restored = torch.cuda.Event()
                self.restored.record()
            self.loaded = False

    def own_value(self, tensor: Tensor) -> Tensor | None:
        """The model's own value of one of `tensors` while the reference is loaded, a copy in host memory; else None."""
        number = next((number for number, one in enumerate(self.tensors) if one is tensor), None)
        if number is None or self._own is None:
            return None
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._own.read(number, made)
        return made

    def _save(self, copy: HostCopy, tensors: list[Tensor]) -> None:
        copy.save(tensors)
        if self._on_gpu:
            torch.cuda.synchronize()


@dataclasses.dataclass(frozen=True)
class BaseReference:
    """The reference of LoRA: the model without its adapters, which needs no memory."""

    stages: Sequence[GPTModel]
    host_bytes = 0

    def loaded_weights(self) -> AbstractContextManager[None]:
        """Within the block the model computes without adapters."""
        return without_adapters(self.stages)


def _state(stage: GPTModel) -> Iterator[Tensor]:
    """Parameters and persistent buffers: the router's expert bias is one.

    Others, such as the rotary tables of latent attention, are the same in both models, and are replaced by longer ones.
    """
    yield from stage.parameters()
    for module in stage.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield buffer


@dataclasses.dataclass(frozen=True)
class PrecomputeConfig:
    """What --precompute-ref-log-probs needs to know of the run."""

    folder: Path
    ref_load: str
    settings: dict[str, Any]  # of `forward_settings`
    micro_batch_group: int  # consecutive micro-batches that virtual pipeline stages process together

    @classmethod
    def from_args(cls, args: Arguments) -> PrecomputeConfig | None:
        """None without the flag."""
        if args.precompute_ref_log_probs is None:
            return None
        folder, group = Path(args.precompute_ref_log_probs), args.microbatch_group_size_per_vp_stage or 1
        return cls(folder, str(args.ref_load), forward_settings(args), group)


@dataclasses.dataclass(frozen=True)
class StoredLogProbs:
    """What the folder has of a rank's batch; equal on all ranks that share its samples."""

    batch: RolloutBatch
    keys: list[bytes]  # of the samples; empty except on the rank that leads the replica
    known: Tensor  # bool [samples], on the host
    values: Tensor  # float32 [response tokens], on the trainer's device; 0 where not known
    needed: list[MicroBatch]  # those with a pass; of the same numbers on all data-parallel ranks

    @property
    def rows(self) -> list[int]:
        """The samples in the pass: those that are not known, and the others of their micro-batches."""
        return [row for micro_batch in self.needed for row in micro_batch.rows]


@dataclasses.dataclass(frozen=True)
class PrecomputedReference:
    """The folder of --precompute-ref-log-probs, which one rank of each data-parallel rank reads and writes.

    What is computed in place of a missing value is that of the pass without a folder, bit for bit: its micro-batch is
    computed as a whole. `folder` is None on the other ranks.
    """

    folder: ReferenceFolder | None
    parallel: ParallelState
    micro_batch_group: int  # of `PrecomputeConfig`

    @classmethod
    def open(cls, config: PrecomputeConfig, weights: str, parallel: ParallelState) -> PrecomputedReference:
        """Opens the folder for a reference whose weights have the checksum `weights`; collective over all ranks.

        Raises CheckpointError if the folder is of another reference or cannot be written.
        """
        folder, identity = config.folder, ReferenceIdentity(weights, config.settings, config.ref_load)
        run_on_rank_zero(lambda: reference_log_probs.claim(folder, identity))
        own = ReferenceFolder(folder, identity) if parallel.leads_replica else None
        if own is not None and parallel.dp_rank == 0:
            logger.info("%s %s has the values of %d samples", reference_log_probs.FLAG, folder, len(own))
        return cls(own, parallel, config.micro_batch_group)

    def look_up(self, batch: RolloutBatch, micro_batches: Sequence[MicroBatch]) -> StoredLogProbs:
        """The known values of `batch`, all of whose samples are in `micro_batches`; collective over all ranks."""
        known = batch.response_lengths == 0
        values = torch.zeros(batch.loss_mask.numel())
        keys: list[bytes] = []
        if self.folder is not None:
            keys = _keys(batch)
            parts = values.split(batch.response_lengths.tolist())
            for row, found in enumerate(self.folder.find(keys)):
                if found is not None:
                    known[row] = True
                    parts[row].copy_(torch.from_numpy(found))
        # one rank decides: another might see a file earlier, and the ranks of a sample must agree bit for bit
        both = self.parallel.from_leader(torch.cat([known.float(), values]).to(self.parallel.device))
        known = both[: len(batch)].cpu() > 0
        lacking = [not bool(known[list(micro_batch.rows)].all()) for micro_batch in micro_batches]
        return StoredLogProbs(batch, keys, known, both[len(batch) :], self._needed(micro_batches, lacking))

    def _needed(self, micro_batches: Sequence[MicroBatch], lacking: Sequence[bool]) -> list[MicroBatch]:
        """The micro-batches that lack a value on any data-parallel rank, in whole groups.

        Ranks exchange data in the layers (expert parallelism, sharded weights), so all compute the same numbers.
        """
        wanted = torch.tensor(lacking, dtype=torch.int32).view(-1, self.micro_batch_group).amax(1)
        wanted = wanted.to(self.parallel.device)
        if self.parallel.dp_size > 1:
            dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=self.parallel.dp_group)
        chosen = wanted.cpu().repeat_interleave(self.micro_batch_group).tolist()
        return [micro_batch for micro_batch, take in zip(micro_batches, chosen, strict=True) if take]

    def completed(self, stored: StoredLogProbs, computed: Tensor | None) -> Tensor:
        """The values of the whole batch, float32 [response tokens]; new ones are added to the folder.

        `computed` is the result of the pass over `stored.needed`, None if there was none.
        """
        if computed is None:
            return stored.values
        lengths = stored.batch.response_lengths
        is_known = torch.repeat_interleave(stored.known, lengths).to(computed.device)
        whole = torch.where(is_known, stored.values, computed)
        if self.folder is not None:
            parts = whole.cpu().split(lengths.tolist())
            fresh = [row for row in (~stored.known).nonzero().flatten().tolist() if bool(parts[row].isfinite().all())]
            self.folder.add({stored.keys[row]: parts[row].numpy() for row in fresh})
        return whole


def _keys(batch: RolloutBatch) -> list[bytes]:
    samples = np.split(batch.tokens.numpy(), batch.token_offsets[1:-1].numpy())
    images = [b""] * len(samples) if batch.images is None else batch.images.digests()
    return list(map(sample_key, samples, batch.response_lengths.tolist(), images))
