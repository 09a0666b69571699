"""Writes a Hugging Face folder: from a torch_dist checkpoint, or from the trainer's weights when a checkpoint is saved.

The folder appears atomically. It has every tensor of the original folder exactly once, in the original's dtypes, with
the original's tokenizer and config. The converter (`torch_dist_to_hf`) needs no model and no GPU, holds a few rows or
one layer's tensors at a time, and several processes may share the work.

In the export of a trainer all ranks take part, each writes its own files, and a rank that cannot write still gathers to
the end, because other ranks of its groups wait for it.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from torch import Tensor

from slimrl.models.families import FAMILIES, ModelMapping, ParamMapping, family_for
from slimrl.models.families.param_mapping import CLASSIFIER_HEAD, VALUE_HEAD, VALUE_HEAD_ROW
from slimrl.models.model_spec import ModelSpec
from slimrl.platform.collective_errors import ConversionGroup
from slimrl.processes.files import AtomicDir, check_apart, listed, partial_path
from slimrl.weights.convert.torch_dist_reader import Scratch, StoredTensor, TorchDistCheckpoint
from slimrl.weights.hf_checkpoint import HfCheckpoint, block_size, plan_files, read_hf_config, writer_of
from slimrl.weights.hf_checkpoint_writer import (
    MAX_SHARD_BYTES,
    Shard,
    ShardWriter,
    TensorSpec,
    classifier_config,
    companions,
    finish,
    replaceable,
)
from slimrl.weights.reshard import check_hf_names, from_shards, hf_shapes, megatron_shape, redundant_head

_WORKERS = 2  # threads of one process; each holds one part of one weight at a time
_ROWS_BYTES = 8 * 1024**2  # embedding and head, the largest tensors, are read in runs of about this many bytes


@dataclasses.dataclass(frozen=True)
class _Job:
    """A weight to copy: from the checkpoint by its row, or by name from the original if the checkpoint lacks it."""

    specs: tuple[TensorSpec, ...]
    row: ParamMapping | None = None
    stored: StoredTensor | None = None


def torch_dist_to_hf(
    input_dir: Path,
    output_dir: Path,
    origin_hf_dir: Path,
    *,
    vocab_size: int | None = None,
    model_name: str | None = None,
    add_missing: bool = False,
    force: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    group: ConversionGroup | None = None,
    on_start: Callable[[int], Callable[[int], object]] = lambda nbytes: lambda written: None,
) -> None:
    """Writes the checkpoint `input_dir` as the Hugging Face folder `output_dir`, modelled on `origin_hf_dir`.

    `vocab_size` keeps that many rows of the embedding (default: that of the origin's config.json) and is written to the
    new config.json. `model_name` selects the family instead of config.json's model_type. `add_missing` copies tensors
    that the checkpoint or the family's mapping lacks from the origin. `on_start` is called with the bytes that this
    process writes, and its result with the bytes of each finished part.
    Raises FileExistsError for an existing output folder without `force`, FileNotFoundError for missing inputs,
    ValueError naming a tensor that is missing, unexpected or of a wrong shape, for too little disk space or, with
    `force`, naming files in the output folder that do not belong to a converted model.
    """
    group = group or ConversionGroup()
    check_apart(output_dir, "--output-dir", origin_hf_dir, "--origin-hf-dir")
    check_apart(output_dir, "--output-dir", input_dir, "--input-dir")
    config = read_hf_config(origin_hf_dir)
    family = family_for(config) if model_name is None else family_named(model_name).for_config(config)
    spec = ModelSpec.from_hf_config({**config, "model_type": family.model_type})
    if block_size(config) is not None:
        del config["quantization_config"]  # the weights are written as the bf16 that the fp8 blocks stand for
    if vocab_size is not None:
        spec = dataclasses.replace(spec, vocab_size=vocab_size)
        config["vocab_size"] = vocab_size
    checkpoint = TorchDistCheckpoint.of_model(input_dir)
    if checkpoint.find(VALUE_HEAD) is not None:
        spec = dataclasses.replace(spec, tied=True)  # the head takes the place of an output layer
        config = classifier_config(config)
    with HfCheckpoint(origin_hf_dir) as origin:
        jobs = _jobs(checkpoint, origin, family, spec, config, add_missing=add_missing)
        shards = plan_files([spec for job in jobs for spec in job.specs], max_shard_bytes, stacks=origin.stacks_experts)
        beside = companions(Path(origin_hf_dir))
        needed = sum(shard.nbytes for shard in shards) + sum(path.stat().st_size for path in beside)
        replace = replaceable(beside) if force else ()
        folder = AtomicDir(output_dir, replace=replace, needed_bytes=needed if group.is_rank_zero else 0)
        mine = sorted(shards, key=lambda shard: -shard.nbytes)[group.rank :: group.size]
        on_written = on_start(sum(shard.nbytes - len(shard.header) for shard in mine))
        with group.joined():
            try:
                group.run_on_all_ranks(folder.open if group.is_rank_zero else lambda: None)
                convert = _Conversion(checkpoint, origin, spec, on_written)
                group.run_on_all_ranks(lambda: convert.run(jobs, mine, partial_path(output_dir)))
                if group.is_rank_zero:
                    finish(folder.partial, shards, beside, config)
                group.run_on_all_ranks(folder.commit if group.is_rank_zero else lambda: None)
            except BaseException:
                if group.is_rank_zero:
                    folder.discard()
                raise


def family_named(model_name: str) -> ModelMapping:
    """The family of a user-written name ("qwen3moe", "Qwen3MoeForCausalLM"), by its model_type."""
    wanted = _plain(model_name)
    for family in FAMILIES:
        if _plain(family.model_type) == wanted:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ValueError(f"--model-name {model_name} is not a supported family: give one of {known}, or leave it out")


def _plain(name: str) -> str:
    plain = name.lower().replace("_", "").replace("-", "")
    return plain.removesuffix("config").removesuffix("forcausallm")


def _jobs(
    checkpoint: TorchDistCheckpoint,
    origin: HfCheckpoint,
    family: ModelMapping,
    spec: ModelSpec,
    config: dict[str, Any],
    *,
    add_missing: bool,
) -> list[_Job]:
    """All weights to write; raises for a checkpoint or an origin of another model before anything is written."""
    carried = family.carried_prefixes(config)
    value_head = checkpoint.find(VALUE_HEAD)
    if not add_missing and value_head is None:
        check_hf_names(origin.names, family, spec, str(origin.folder), carried)
    head = redundant_head(origin.names, family, spec) if value_head is None else None
    jobs: list[_Job] = []
    named: set[str] = set()
    if value_head is not None:
        dtype = origin.dtype(family.embedding.hf[0].name)
        of_head = TensorSpec(CLASSIFIER_HEAD, dtype, (1, spec.hidden_size))
        jobs.append(_Job((of_head,), VALUE_HEAD_ROW, value_head))
        named |= {CLASSIFIER_HEAD, *(part.name for part in family.head.hf)}
    for row, stored in _places(checkpoint, family, spec, add_missing=add_missing).items():
        shapes = dict(zip([part.name for part in row.hf], hf_shapes(row, spec), strict=True))
        if head is not None and row.hf == family.embedding.hf:
            shapes[head] = next(iter(shapes.values()))
        specs = tuple(TensorSpec(name, origin.dtype(name), size) for name, size in shapes.items())
        jobs.append(_Job(specs, row, stored) if stored is not None else _Job(specs))
        named |= shapes.keys()
    for name in origin.names:
        if name not in named and (add_missing or name.startswith(carried)):
            jobs.append(_Job((TensorSpec(name, origin.dtype(name), origin.shape(name)),)))
    return jobs


def _places(
    checkpoint: TorchDistCheckpoint, family: ModelMapping, spec: ModelSpec, *, add_missing: bool
) -> dict[ParamMapping, StoredTensor | None]:
    """Location of each row, None if it is copied from the origin."""
    places: dict[ParamMapping, StoredTensor | None] = {}
    unused = checkpoint.sizes
    if (value_head := checkpoint.find(VALUE_HEAD)) is not None:
        del unused[value_head.key]
    for row in family.rows(spec):
        found = next((place for name in row.megatron if (place := checkpoint.find(name)) is not None), None)
        places[row] = found
        if found is None and not add_missing:
            raise ValueError(
                f"{checkpoint.folder} lacks {row.megatron[0]}, which the {family.model_type} model in --origin-hf-dir"
                f" ({spec.num_layers} layers) has: give the origin that the checkpoint was converted from, or"
                " --add-missing-from-origin-hf to take such tensors from it"
            )
        if found is None:
            continue
        wanted = megatron_shape(row, dataclasses.replace(spec, padded_vocab_size=found.shape[0]))
        too_few = row.padded_vocab and found.shape[0] < spec.vocab_size
        if found.shape != wanted or too_few:
            rows = f"at least {spec.vocab_size} rows" if too_few else f"shape {list(wanted)}"
            raise ValueError(
                f"{checkpoint.folder}: {row.megatron[0]} has shape {list(found.shape)} but --origin-hf-dir"
                f"{' (or --vocab-size)' if row.padded_vocab else ''} requires {rows}: give the matching origin"
            )
        elements = 1
        for length in found.shape:
            elements *= length
        unused[found.key] -= elements
    if left_over := [key for key, elements in unused.items() if elements]:
        raise ValueError(
            f"{checkpoint.folder} has {listed(left_over)}, which the {family.model_type} model of {spec.num_layers}"
            " layers in --origin-hf-dir does not have: give the origin that the checkpoint was converted from"
        )
    return places


class _Conversion:
    """Copies weights in a few threads, each holding one part of one weight."""

    def __init__(
        self,
        checkpoint: TorchDistCheckpoint,
        origin: HfCheckpoint,
        spec: ModelSpec,
        on_written: Callable[[int], object],
    ) -> None:
        self._checkpoint = checkpoint
        self._origin = origin
        self._spec = spec
        self._on_written = on_written
        self._stopped = threading.Event()

    def run(self, jobs: Sequence[_Job], shards: Sequence[Shard], folder: Path) -> None:
        """Writes the files of `shards` into `folder`."""
        with writer_of(folder, shards, stacks=self._origin.stacks_experts) as writer:
            mine = [job for job in jobs if any(spec.name in writer for spec in job.specs)]
            parts = iter([part for job in mine for part in self._parts(job)])
            lock = threading.Lock()

            def work() -> None:
                scratch = Scratch()
                while not self._stopped.is_set():
                    with lock:
                        part = next(parts, None)
                    if part is None:
                        return
                    self._carry(*part, writer, scratch)

            with ThreadPoolExecutor(_WORKERS) as pool:
                threads = [pool.submit(work) for _ in range(_WORKERS)]
                try:
                    wait(threads, return_when=FIRST_EXCEPTION)
                finally:
                    self._stopped.set()
            for thread in threads:
                thread.result()

    def _parts(self, job: _Job) -> Iterator[tuple[_Job, slice | None]]:
        """Embedding and head in runs of rows, other weights whole."""
        if job.stored is None or job.row is None or not job.row.padded_vocab:
            yield job, None
            return
        vocab = job.specs[0].shape[0]
        row_bytes = max(1, job.specs[0].nbytes // max(1, vocab))
        step = max(1, _ROWS_BYTES // row_bytes)
        for begin in range(0, vocab, step):
            yield job, slice(begin, min(begin + step, vocab))

    def _carry(self, job: _Job, rows: slice | None, writer: ShardWriter, scratch: Scratch) -> None:
        if job.stored is None or job.row is None:
            tensors = [self._origin.tensor(spec.name) for spec in job.specs]
        elif rows is not None:
            # padding comes after these rows, which are the same on both sides
            tensors = [self._checkpoint.read(job.stored, rows, scratch.empty)] * len(job.specs)
        else:
            # a checkpoint has the full weights, like a tensor-parallel rank of size 1
            tensors = from_shards(job.row, [self._checkpoint.read(job.stored, None, scratch.empty)], self._spec)
        for spec, tensor in zip(job.specs, tensors, strict=True):
            if spec.name in writer:
                self._on_written(writer.write(spec.name, tensor, first_row=rows.start if rows is not None else 0))


class HfPlan:
    """The tensors and files of a run's exports, and which files this rank writes."""

    def __init__(
        self,
        origin_hf_dir: Path,
        spec: ModelSpec,
        family: ModelMapping,
        *,
        rank: int = 0,
        world_size: int = 1,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        value_head: bool = False,
    ) -> None:
        """With `value_head` the exports are classifiers. Raises FileNotFoundError or ValueError for another model."""
        self.origin = Path(origin_hf_dir)
        self.config = read_hf_config(self.origin)
        self.beside = companions(self.origin)
        with HfCheckpoint(self.origin) as stored:
            carried = family.carried_prefixes(self.config)
            check_hf_names(stored.names, family, spec, str(self.origin), carried)
            head = None if value_head else redundant_head(stored.names, family, spec)
            if value_head:
                spec = dataclasses.replace(spec, tied=True)  # the head takes the place of an output layer
                self.config = classifier_config(self.config)
            shapes: dict[str, tuple[int, ...]] = {}
            for row in family.rows(spec):
                shapes |= dict(zip([part.name for part in row.hf], hf_shapes(row, spec), strict=True))
            self.twice = {} if head is None else {family.embedding.hf[0].name: head}  # tied, but stored
            shapes |= {copy: shapes[name] for name, copy in self.twice.items()}
            self.carried = [name for name in stored.names if name not in shapes and name.startswith(carried)]
            shapes |= {name: stored.shape(name) for name in self.carried}
            specs = [TensorSpec(name, stored.dtype(name), size) for name, size in shapes.items()]
            if value_head:
                dtype = stored.dtype(family.embedding.hf[0].name)
                specs.append(TensorSpec(CLASSIFIER_HEAD, dtype, (1, spec.hidden_size)))
            self.shards = plan_files(specs, max_shard_bytes, stacks=stored.stacks_experts)
            self.stacks_experts = stored.stacks_experts
        if block_size(self.config) is not None:
            del self.config["quantization_config"]  # the weights are written as the bf16 that the fp8 blocks stand for
        self.own_shards = self.shards[rank::world_size]
        written = self.writer(Path())
        self.own_names = {spec.name for spec in specs if spec.name in written}

    def writer(self, folder: Path) -> ShardWriter:
        """Writes this rank's files into `folder`, at the first tensor of each."""
        return writer_of(folder, self.own_shards, stacks=self.stacks_experts)


class HfExport:
    """One export: `begin` on one rank, `collect` and `write` on all, then `commit` on one rank."""

    def __init__(self, plan: HfPlan, folder: Path, tensors: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """`tensors` gathers the (name, full tensor) pairs of the whole model, each valid until the next; collective.

        An existing export of the same rollout, from before a resume, is replaced. Raises FileExistsError,
        NotADirectoryError or ValueError if something else exists at `folder`.
        """
        needed = sum(shard.nbytes for shard in plan.shards)
        self._plan = plan
        self._tensors = tensors
        self._folder = AtomicDir(folder, replace=replaceable(plan.beside), needed_bytes=needed)
        self._writer: ShardWriter | None = None
        self._copies: dict[str, Tensor] = {}

    @property
    def path(self) -> Path:
        """The final folder."""
        return self._folder.folder

    def begin(self) -> None:
        """Create the partial folder."""
        self._folder.open()

    def collect(self, *, copy: bool) -> None:
        """Take this rank's part of the current weights; collective over all ranks.

        With `copy` they are kept in host memory for `write`, else written at once.
        """
        if self._plan.own_shards and not copy:
            self._writer = self._plan.writer(self._folder.partial)
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
        """Write the rest of this rank's files and flush them to disk."""
        if not self._plan.own_shards:
            return
        writer, self._writer = self._writer or self._plan.writer(self._folder.partial), None
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
        """Add tokenizer, index and config, and rename the folder to its final name."""
        finish(self._folder.partial, self._plan.shards, self._plan.beside, self._plan.config)
        self._folder.commit()

    def discard(self) -> None:
        """Remove what was written."""
        self._folder.discard()
