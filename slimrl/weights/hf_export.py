"""One export of the trained weights into a Hugging Face folder, written by all ranks, each its own files.

Promises a folder that appears whole or not at all, with every tensor of the original exactly once, in the original's
dtype, beside its tokenizer and config; and that a rank which cannot write still gathers to the end, because others of
its groups wait for it. Called when a checkpoint is saved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from slimrl.weights.families import Family
from slimrl.weights.fp8_blocks import block_size
from slimrl.weights.hf_files import HfCheckpoint, read_hf_config
from slimrl.weights.hf_folder import companions, finish, replaceable
from slimrl.weights.hf_shards import MAX_SHARD_BYTES, ShardWriter, TensorSpec, plan_shards
from slimrl.weights.layout import hf_shapes
from slimrl.weights.names import check_hf_names, redundant_head
from slimrl.weights.new_folder import NewFolder
from slimrl.weights.shape import ModelShape


class HfPlan:
    """Which tensors the exports of a run hold, in which files, and which of them this rank writes."""

    def __init__(
        self,
        origin_hf_dir: Path,
        shape: ModelShape,
        family: Family,
        *,
        rank: int = 0,
        world_size: int = 1,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """Raises FileNotFoundError or ValueError where the original lacks weights, or holds another model's."""
        self.origin = Path(origin_hf_dir)
        self.config = read_hf_config(self.origin)
        self.beside = companions(self.origin)
        with HfCheckpoint(self.origin) as stored:
            carried = family.carried_prefixes(self.config)
            check_hf_names(stored.names, family, shape, str(self.origin), carried)
            head = redundant_head(stored.names, family, shape)
            shapes: dict[str, tuple[int, ...]] = {}
            for row in family.rows(shape):
                shapes |= dict(zip([part.name for part in row.hf], hf_shapes(row, shape), strict=True))
            self.twice = {} if head is None else {family.embedding.hf[0].name: head}  # tied, and stored all the same
            shapes |= {copy: shapes[name] for name, copy in self.twice.items()}
            self.carried = [name for name in stored.names if name not in shapes and name.startswith(carried)]
            shapes |= {name: stored.shape(name) for name in self.carried}
            specs = [TensorSpec(name, stored.dtype(name), size) for name, size in shapes.items()]
        if block_size(self.config) is not None:
            del self.config["quantization_config"]  # the weights are written as the bf16 that the fp8 blocks stand for
        self.shards = plan_shards(specs, max_shard_bytes)
        self.own_shards = self.shards[rank::world_size]
        self.own_names = {spec.name for shard in self.own_shards for spec in shard.specs}


class HfExport:
    """One folder: `begin` and `commit` on one rank, `collect` and `write` on all, in the order begin to commit."""

    def __init__(self, plan: HfPlan, folder: Path, tensors: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """`tensors` gathers the (name, full tensor) pairs of the whole model, each valid until the next; collective.

        An export that is there already, of the same rollout before a resume, is replaced. Raises FileExistsError,
        NotADirectoryError or ValueError for what else is in the way of `folder`.
        """
        needed = sum(shard.nbytes for shard in plan.shards)
        self._plan = plan
        self._tensors = tensors
        self._folder = NewFolder(folder, replace=replaceable(plan.beside), needed_bytes=needed)
        self._writer: ShardWriter | None = None
        self._copies: dict[str, Tensor] = {}

    @property
    def path(self) -> Path:
        """Where it will lie."""
        return self._folder.folder

    def begin(self) -> None:
        """Make the partial folder."""
        self._folder.open()

    def collect(self, *, copy: bool) -> None:
        """Take this rank's share of the weights of now; collective over all ranks.

        With `copy` they are kept in host memory for `write`, else written at once.
        """
        if self._plan.own_shards and not copy:
            self._writer = ShardWriter(self._folder.partial, self._plan.own_shards)
        failure: OSError | ValueError | None = None
        for name, tensor in self._tensors():
            for own in {name, self._plan.twice.get(name, name)} & self._plan.own_names:
                try:
                    self._take(own, tensor, copy)
                except (OSError, ValueError) as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def _take(self, name: str, tensor: Tensor, copy: bool) -> None:
        if self._writer is None:
            self._copies[name] = tensor.detach().to("cpu", copy=copy)
        else:
            self._writer.write(name, tensor.detach().cpu())

    def write(self) -> None:
        """Write what is left of this rank's files, and see that they are on the disk."""
        if not self._plan.own_shards:
            return
        writer, self._writer = self._writer or ShardWriter(self._folder.partial, self._plan.own_shards), None
        with writer, HfCheckpoint(self._plan.origin) as origin:
            for name in list(self._copies):
                writer.write(name, self._copies.pop(name))
            for name in self._plan.carried:
                if name in writer:
                    writer.write(name, origin.tensor(name))
        for shard in self._plan.own_shards:
            descriptor = os.open(self._folder.partial / shard.file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def commit(self) -> None:
        """Add tokenizer, index and config, and put the folder in its place."""
        finish(self._folder.partial, self._plan.shards, self._plan.beside, self._plan.config)
        self._folder.commit()

    def discard(self) -> None:
        """Remove what was written."""
        self._folder.discard()
