"""Loads a Hugging Face checkpoint into a Megatron model, or converts it to a torch_dist checkpoint without a model.

Both use the family's parameter mapping. Every parameter is written exactly once and every stored tensor is used, or an
error names the tensor.

Loading: each rank reads its slices of the memory-mapped files, without communication. Converting: the result equals
megatron-core's save of the loaded model, entry by entry; one weight at a time is in memory, the folder appears
atomically, and several processes may share the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from slimrl.arguments.checkpoints import MANIFEST_NAME, RELEASE, SIZES, TRACKER_NAME, manifest
from slimrl.models.families import ModelMapping, ParamMapping
from slimrl.models.families.param_mapping import CLASSIFIER_HEAD, VALUE_HEAD
from slimrl.models.model_spec import ModelSpec
from slimrl.platform.collective_errors import ConversionGroup
from slimrl.processes.files import AtomicDir, check_apart, check_space, listed, partial_path
from slimrl.weights.checkpoint_checksums import CHECKSUMS_NAME, Checksums, checksums_text
from slimrl.weights.convert.torch_dist_writer import MAX_FILE_BYTES, Blueprint, Weight, write_torch_dist
from slimrl.weights.hf_checkpoint import HfCheckpoint, read_hf_config
from slimrl.weights.reshard import (
    check_hf_names,
    check_hf_shapes,
    check_tensor_parallel,
    find,
    global_tensors,
    redundant_head,
    to_shard,
)


@torch.no_grad()
def load_hf_checkpoint(
    model: nn.Module | Sequence[nn.Module],
    spec: ModelSpec,
    family: ModelMapping,
    hf_dir: Path,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    etp_rank: int = 0,
    etp_size: int = 1,
    value_head: bool = False,
    progress: Callable[[Sequence[ParamMapping]], Iterable[ParamMapping]] = iter,
) -> None:
    """Fills the parameters of `model` (a bare GPTModel of any pipeline stage, or its chunks), casting to their dtype.

    `tp_rank` of `tp_size` shards dense weights, `etp_rank` of `etp_size` each expert; the model determines which
    experts this rank holds. `progress` wraps the iterable of rows to load, for example tqdm. With `value_head` the
    model has one instead of an output layer: it is loaded from a classifier's, and kept as it is without one.
    Raises FileNotFoundError for missing files and ValueError naming a tensor that is missing, unexpected or of another
    shape than the flags describe.
    """
    check_tensor_parallel(spec, tp_size, etp_size)
    parameters = global_tensors(model)
    head = parameters.pop(VALUE_HEAD, None) if value_head else None
    with HfCheckpoint(hf_dir) as checkpoint:
        is_classifier = value_head and CLASSIFIER_HEAD in checkpoint.names
        if is_classifier:  # it has no output layer, as if that were the embedding
            spec = dataclasses.replace(spec, tied=True)
            _check_value_head(checkpoint, spec)
        check_checkpoint(checkpoint, spec, family, besides=(CLASSIFIER_HEAD,) if is_classifier else ())
        if is_classifier and head is not None:
            head.copy_(checkpoint.tensor(CLASSIFIER_HEAD))
        for row in progress(_local_rows(family, spec, parameters)):
            parts = [checkpoint.tensor(part.name) for part in row.hf]
            rank, size = (tp_rank, tp_size) if row.expert is None else (etp_rank, etp_size)
            shard = to_shard(row, parts, spec, rank=rank, size=size)
            name = find(row, parameters)
            assert name is not None  # `_local_rows` returns only rows that this rank has
            _copy(shard, parameters.pop(name), row)
    if parameters:
        raise ValueError(
            f"the model has {listed(parameters)}, which no tensor of {hf_dir} fills: the model flags describe"
            f" something that the parameter mapping of {family.model_type} does not have"
        )


def _check_value_head(checkpoint: HfCheckpoint, spec: ModelSpec) -> None:
    shape = checkpoint.shape(CLASSIFIER_HEAD)
    if shape != (1, spec.hidden_size):
        raise ValueError(
            f"{checkpoint.folder}: {CLASSIFIER_HEAD} has shape {list(shape)} and a value head [1, {spec.hidden_size}]:"
            " give a classifier with one output (num_labels 1), such as a reward model"
        )


def check_checkpoint(
    checkpoint: HfCheckpoint, spec: ModelSpec, family: ModelMapping, besides: tuple[str, ...] = ()
) -> None:
    """Raises ValueError if the stored names, shapes or a redundant head do not match the family and sizes.

    Ignores the names `besides` and multi-token prediction layers (`ModelMapping.carried_prefixes`).
    """
    where = str(checkpoint.folder)
    carried = (*family.carried_prefixes(read_hf_config(checkpoint.folder)), *besides)
    check_hf_names(checkpoint.names, family, spec, where, carried)
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names}
    check_hf_shapes(shapes, family, spec, where)
    head = redundant_head(checkpoint.names, family, spec)
    if head is not None and not torch.equal(
        checkpoint.tensor(head), checkpoint.tensor(embedding := family.embedding.hf[0].name)
    ):
        raise ValueError(
            f"{where}: config.json ties the output head to the embedding, yet {head} differs from {embedding}:"
            " set tie_word_embeddings to false, or remove that tensor from the checkpoint"
        )


def _local_rows(family: ModelMapping, spec: ModelSpec, parameters: dict[str, Tensor]) -> list[ParamMapping]:
    """The rows whose Megatron tensor this rank has; a tied last pipeline stage has the embedding as its head."""
    rows = [row for row in family.rows(spec) if find(row, parameters) is not None]
    if spec.tied and find(family.head, parameters) is not None:
        rows.append(ParamMapping(family.head.megatron, family.embedding.hf, shard_dim=family.head.shard_dim))
    return rows


def _copy(shard: Tensor, parameter: Tensor, row: ParamMapping) -> None:
    if shard.shape != parameter.shape:
        raise ValueError(
            f"{row.megatron[0]} has shape {list(parameter.shape)} in the model but {list(shard.shape)} by its mapping:"
            " the model was not built from the same flags"
        )
    parameter.copy_(shard)


_ROWS_BYTES = 16 * 1024**2  # embedding and head are stored in blocks of about this many bytes


def hf_to_torch_dist(
    hf_dir: Path,
    save_dir: Path,
    spec: ModelSpec,
    family: ModelMapping,
    blueprint_into: Callable[[Path | None], Blueprint],
    *,
    force: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
    group: ConversionGroup | None = None,
    on_start: Callable[[int], Callable[[int], object]] = lambda nbytes: lambda written: None,
) -> Path:
    """Writes `save_dir/release` and the tracker file that names it; returns `save_dir/release`.

    `blueprint_into` returns the checkpoint's contents and writes megatron-core's own small files into the folder that
    is passed to it. `on_start` is called with the bytes of the whole checkpoint, and its result with those of each
    written block.
    Raises FileExistsError for an existing, not empty `save_dir` without `force`, FileNotFoundError for missing
    inputs, ValueError naming a tensor that is missing, unexpected or of another shape, for too little disk space, or,
    with `force`, for a `save_dir` with anything but a converted checkpoint (training checkpoints, for example).
    """
    group = group or ConversionGroup()
    check_apart(save_dir, "--save", hf_dir, "--hf-checkpoint")
    with HfCheckpoint(hf_dir) as checkpoint:
        check_checkpoint(checkpoint, spec, family)
        folder = AtomicDir(save_dir, replace=(RELEASE, TRACKER_NAME) if force else ())
        release = partial_path(save_dir) / RELEASE
        try:
            if group.is_rank_zero:
                folder.open()
                release.mkdir()
            blueprint = blueprint_into(release if group.is_rank_zero else None)
            source = _Source(checkpoint, blueprint, spec, family)
            blueprint = source.in_rows(blueprint)
            on_written = on_start(blueprint.nbytes)
            with group.joined():
                group.run_on_all_ranks(
                    lambda: check_space(folder.folder, blueprint.nbytes if group.is_rank_zero else 0)
                )
                checksums = write_torch_dist(
                    release,
                    blueprint,
                    source.read,
                    rank=group.rank,
                    world_size=group.size,
                    max_file_bytes=max_file_bytes,
                    on_written=on_written,
                )
                group.run_on_all_ranks(lambda: _commit(folder, checksums, spec) if group.is_rank_zero else None)
        except BaseException:
            if group.is_rank_zero:
                folder.discard()
            raise
    return Path(save_dir) / RELEASE


def _commit(folder: AtomicDir, checksums: Mapping[str, Checksums], spec: ModelSpec) -> None:
    """Writes checksums, manifest and the tracker file, then renames the folder to its final name."""
    release = folder.partial / RELEASE
    (release / CHECKSUMS_NAME).write_text(checksums_text(release, checksums), encoding="utf-8")
    files = {path.name: path.stat().st_size for path in release.iterdir()}
    sizes = {name: getattr(spec, name) for name in SIZES}
    (release / MANIFEST_NAME).write_text(manifest(None, files, sizes=sizes), encoding="utf-8")
    (folder.partial / TRACKER_NAME).write_text(RELEASE, encoding="utf-8")
    folder.commit()


class _Source:
    """The model's weights by their Megatron names, from the Hugging Face files."""

    def __init__(self, checkpoint: HfCheckpoint, blueprint: Blueprint, spec: ModelSpec, family: ModelMapping) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._rows: dict[str, ParamMapping] = {}
        names = {weight.name for weight in blueprint.weights}
        for row in family.rows(spec):
            name = find(row, names)
            if name is None:
                raise ValueError(
                    f"the model that the flags describe has no {row.megatron[0]}, which a {family.model_type} model"
                    " has: use the flags of this model"
                )
            self._rows[name] = row
        if unfilled := names - self._rows.keys():
            raise ValueError(
                f"the model has {listed(unfilled)}, which no tensor of {checkpoint.folder} fills: the model flags"
                f" describe something that the parameter mapping of {family.model_type} does not have"
            )

    def in_rows(self, blueprint: Blueprint) -> Blueprint:
        """The blueprint with embedding and head, the largest weights, split into runs of rows."""
        weights: list[Weight] = []
        for weight in blueprint.weights:
            weights += weight.in_rows(_ROWS_BYTES) if self._rows[weight.name].padded_vocab else [weight]
        return dataclasses.replace(blueprint, weights=tuple(weights))

    def read(self, weight: Weight) -> Tensor:
        """Its values in the stored dtype; a view of the mapped file if no conversion is needed."""
        row, spec = self._rows[weight.name], self._spec
        parts = [self._checkpoint.tensor(part.name) for part in row.hf]
        if weight.rows is not None:
            # rows after the unpadded vocabulary are padding, as for a matrix of this run's length
            begin, end = weight.rows
            parts = [part[begin:end] for part in parts]
            spec = dataclasses.replace(spec, padded_vocab_size=end - begin)
        return to_shard(row, parts, spec, rank=0, size=1).to(weight.pieces[0].dtype)
