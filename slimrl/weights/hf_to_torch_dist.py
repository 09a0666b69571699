"""From a Hugging Face folder to a torch_dist checkpoint, by the same table that loads one into a model.

Promises what megatron-core's own save of the loaded model would write, entry for entry, without that model: each
weight is read memory-mapped, put in order and written before the next. The folder appears whole or not at all;
several processes may share the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from slimrl.megatron.checkpoint_folder import RELEASE, TRACKER_NAME
from slimrl.weights.families import Family, Row
from slimrl.weights.file_checksums import CHECKSUMS_NAME, Checksums, checksums_text
from slimrl.weights.hf_files import HfCheckpoint
from slimrl.weights.layout import to_shard
from slimrl.weights.load import check_checkpoint
from slimrl.weights.megatron_names import find
from slimrl.weights.names import listed
from slimrl.weights.new_folder import NewFolder, check_apart, check_space, partial_path
from slimrl.weights.shape import ModelShape
from slimrl.weights.team import Team
from slimrl.weights.torch_dist_writer import MAX_FILE_BYTES, Blueprint, Weight, write_torch_dist

_ROWS_BYTES = 16 * 1024**2  # the vocabulary's tables are stored in blocks of about this many bytes


def hf_to_torch_dist(
    hf_dir: Path,
    save_dir: Path,
    shape: ModelShape,
    family: Family,
    blueprint_into: Callable[[Path | None], Blueprint],
    *,
    force: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
    team: Team | None = None,
    on_start: Callable[[int], Callable[[int], object]] = lambda nbytes: lambda written: None,
) -> Path:
    """Writes `save_dir/release` and the tracker file that names it; returns the former.

    `blueprint_into` says what the checkpoint holds, and writes megatron-core's own small files into the folder it
    is given. `on_start` is told the bytes of the whole checkpoint, and what it returns those of each written block.
    Raises FileExistsError for an existing, not empty `save_dir` without `force`, FileNotFoundError for missing
    inputs, ValueError naming a tensor that is missing, left over or of another shape, for a disk too full, or, with
    `force`, for a `save_dir` that holds anything but a converted checkpoint (checkpoints of training, for example).
    """
    team = team or Team()
    check_apart(save_dir, "--save", hf_dir, "--hf-checkpoint")
    with HfCheckpoint(hf_dir) as checkpoint:
        check_checkpoint(checkpoint, shape, family)
        folder = NewFolder(save_dir, replace=(RELEASE, TRACKER_NAME) if force else ())
        release = partial_path(save_dir) / RELEASE
        try:
            if team.leads:
                folder.open()
                release.mkdir()
            blueprint = blueprint_into(release if team.leads else None)
            source = _Source(checkpoint, blueprint, shape, family)
            blueprint = source.in_rows(blueprint)
            on_written = on_start(blueprint.nbytes)
            with team.joined():
                team.together(lambda: check_space(folder.folder, blueprint.nbytes if team.leads else 0))
                checksums = write_torch_dist(
                    release,
                    blueprint,
                    source.read,
                    rank=team.rank,
                    world_size=team.size,
                    max_file_bytes=max_file_bytes,
                    on_written=on_written,
                )
                team.together(lambda: _commit(folder, checksums) if team.leads else None)
        except BaseException:
            if team.leads:
                folder.discard()
            raise
    return Path(save_dir) / RELEASE


def _commit(folder: NewFolder, checksums: Mapping[str, Checksums]) -> None:
    """The checksums, the tracker file, then the whole folder under its name."""
    release = folder.partial / RELEASE
    (release / CHECKSUMS_NAME).write_text(checksums_text(release, checksums), encoding="utf-8")
    (folder.partial / TRACKER_NAME).write_text(RELEASE, encoding="utf-8")
    folder.commit()


class _Source:
    """The model's weights by their Megatron names, out of the Hugging Face files."""

    def __init__(self, checkpoint: HfCheckpoint, blueprint: Blueprint, shape: ModelShape, family: Family) -> None:
        self._checkpoint = checkpoint
        self._shape = shape
        self._rows: dict[str, Row] = {}
        names = {weight.name for weight in blueprint.weights}
        for row in family.rows(shape):
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
                f" describe something that the table of {family.model_type} does not name"
            )

    def in_rows(self, blueprint: Blueprint) -> Blueprint:
        """The blueprint with the vocabulary's tables, the largest weights, in runs of rows."""
        weights: list[Weight] = []
        for weight in blueprint.weights:
            weights += weight.in_rows(_ROWS_BYTES) if self._rows[weight.name].padded_vocab else [weight]
        return dataclasses.replace(blueprint, weights=tuple(weights))

    def read(self, weight: Weight) -> Tensor:
        """Its values in the dtype they are stored in; a view of the mapped file where nothing changes."""
        row, shape = self._rows[weight.name], self._shape
        parts = [self._checkpoint.tensor(part.name) for part in row.hf]
        if weight.rows is not None:
            # rows behind the true vocabulary are padding, as for a table of this run's length
            begin, end = weight.rows
            parts = [part[begin:end] for part in parts]
            shape = dataclasses.replace(shape, padded_vocab_size=end - begin)
        return to_shard(row, parts, shape, rank=0, size=1).to(weight.pieces[0].dtype)
