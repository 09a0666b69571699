"""Saves the checkpoints of a run, synchronously or in the background (--async-save), and exports models (--save-hf).

A checkpoint is complete or absent, an error on one rank is raised on all, at most one save is in flight, and a newer
save never hides the failure of an older one. A background save runs in one thread per rank. The threads have their own
process group, so a checkpoint is complete as soon as its files are written, independent of training.
`ModelExporter` determines the folder of an export and gathers its tensors from the live model;
`slimrl.weights.convert.megatron_to_hf` writes them. `AdapterExporter` does so for LoRA adapters. The trainer owns both.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slimrl.arguments.checkpoints import read_manifest
from slimrl.arguments.flags.checkpoint import CheckpointArguments
from slimrl.megatron.checkpoint import folder, io
from slimrl.megatron.checkpoint.folder import Retention
from slimrl.megatron.parallel import ParallelState
from slimrl.models.adapters import AdapterConfig, AdapterMapping, peft_config
from slimrl.models.families import family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.platform.collective_errors import RANK_ZERO, CheckpointError, run_on_all_ranks, run_on_rank_zero
from slimrl.weights.adapters import PeftExport
from slimrl.weights.checkpoint_checksums import Checksums
from slimrl.weights.convert.megatron_to_hf import HfExport, HfPlan
from slimrl.weights.hf_checkpoint import read_hf_config
from slimrl.weights.update.export import groups_of, iter_hf_tensors


class ExportPair:
    """Two exports as one, with the calls of `HfExport`; the first names it."""

    def __init__(self, *parts: HfExport | PeftExport) -> None:
        self._parts = parts
        self.path = parts[0].path

    def begin(self) -> None:
        """Creates the partial folders."""
        for part in self._parts:
            part.begin()

    def collect(self, *, copy: bool) -> None:
        """Collective over all ranks."""
        for part in self._parts:
            part.collect(copy=copy)

    def write(self) -> None:
        """Writes the files of both."""
        for part in self._parts:
            part.write()

    def commit(self) -> None:
        """Renames the folders to their final names, one after the other."""
        for part in self._parts:
            part.commit()

    def discard(self) -> None:
        """Removes what was written."""
        for part in self._parts:
            part.discard()


Export = HfExport | PeftExport | ExportPair
_logger = logging.getLogger(__name__)
_LOOKS_EVERY_S = 0.05
_ROUND_S = 5.0  # for which the other ranks wait in a collective
_REPORTS_EVERY_S = 60.0


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state after rollout `iteration`: this rank's data, and the common data that rank 0 writes."""

    iteration: int
    prepared: io.Prepared
    data_state: bytes  # empty: none is saved
    about: dict[str, Any]  # for the manifest


@dataclasses.dataclass(frozen=True)
class Awaited:
    """A checkpoint of other ranks, without which one must not become complete: the critic's in the folder `root`.

    Both have the same `saved_with` in their manifests.
    """

    root: Path
    iteration: int
    saved_with: str

    def wait(self, group: dist.ProcessGroup | None) -> None:
        """Returns when it is complete, as rank 0 sees it; collective over `group`.

        It waits in rounds, so that the time limit of a collective does not limit the other save.
        """
        of_it, began, rounds = self.root / folder.folder_name(self.iteration), time.monotonic(), 0
        complete = [False]
        while not complete[0]:
            if dist.get_rank() == 0:
                complete = [self._is_complete(of_it, _ROUND_S)]
                waited = time.monotonic() - began
                if not complete[0] and waited > _REPORTS_EVERY_S * (rounds + 1):
                    rounds += 1
                    _logger.warning(
                        "the checkpoint of the policy is written, and has waited %.0f s for %s, which the critic's"
                        " ranks write: the folder must be on a file system that both see",
                        waited,
                        of_it,
                    )
            dist.broadcast_object_list(complete, src=0, group=group)

    def _is_complete(self, of_it: Path, within: float) -> bool:
        until = time.monotonic() + within
        while time.monotonic() < until:
            if (read_manifest(of_it) or {}).get("saved_with") == self.saved_with:
                return True
            time.sleep(_LOOKS_EVERY_S)
        return False


class CheckpointSaver:
    """Call `save`, `poll` between saves, and `finish` at the end; each is collective over all ranks.

    In the background the state is copied to the host first. `release` before it changes waits for that.
    """

    def __init__(self, *, background: bool, retention: Retention, timeout: datetime.timedelta) -> None:
        """`timeout` is the longest wait for another rank's files."""
        self.background = background
        self._retention = retention
        self._timeout = timeout
        self._writers: dist.ProcessGroup | None = None  # created by the first save
        self._watchers: dist.ProcessGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._after: Callable[[], None] = lambda: None
        self._awaited: Awaited | None = None
        self._copied = threading.Event()
        self._copied.set()
        self.completed: int | None = None  # the newest checkpoint that is complete, by its iteration

    @classmethod
    def from_args(cls, flags: CheckpointArguments, beside: Sequence[Path], timeout_minutes: int) -> CheckpointSaver:
        """The saver for the flags; old checkpoints in the folders `beside` are deleted together with its own."""
        timeout = datetime.timedelta(minutes=timeout_minutes)
        return cls(background=flags.async_save, retention=Retention.from_args(flags, *beside), timeout=timeout)

    def save(
        self,
        root: Path,
        iteration: int,
        take: Callable[[], Snapshot],
        export: Callable[[], Export] | None = None,
        after: Callable[[], None] = lambda: None,
        awaited: Awaited | None = None,
    ) -> Path:
        """Save the snapshot of `take` in `root`; returns the checkpoint's final folder.

        Waits for the previous save. The `export` is written after the checkpoint is complete. `after` waits for another
        save, without which this one must not become complete; it raises CheckpointError on every rank or on none. In
        the background it is called by the thread. `awaited` is another save of other ranks. Raises CheckpointError, on
        every rank, if this save (in the background: the previous one) failed on a rank; its files are removed, and
        older checkpoints stay.
        """
        self.finish()
        self._open()
        self._after, self._awaited = after, awaited
        started = time.perf_counter()
        run_on_rank_zero(lambda: folder.begin(root, iteration), self._writers)
        snapshot = run_on_all_ranks(take, self._writers)
        if self._thread is None:
            self._write(root, snapshot, started)
            if export is not None:
                self._finish_export(self._begin_export(export))
        else:
            try:
                begun = None if export is None else self._begin_export(export)
            except CheckpointError:
                self._write(root, snapshot, started)  # first, so that a failed export does not lose the checkpoint
                raise
            self._copied.clear()
            self._pending = self._thread.submit(self._write_both, root, snapshot, begun, started)
            if dist.get_rank() == 0:
                name, blocked = folder.folder_name(iteration), time.perf_counter() - started
                _logger.info("%s is written in the background (training waited %.2f s)", root / name, blocked)
        return root / folder.folder_name(iteration)

    def poll(self) -> None:
        """Raise the error of a failed background save, on all ranks in the same call; does not wait for the save.

        Costs one small collective while a save is in progress, otherwise nothing.
        """
        if self._pending is None:
            return
        done = torch.tensor(int(self._pending.done()))
        dist.all_reduce(done, op=dist.ReduceOp.MIN, group=self._watchers)
        if done:
            self.finish()

    def release(self) -> None:
        """Wait until the weights, the optimizer state and their memory may change; call before they do. Not collective.

        Returns at once if no save is in progress, or if the one in progress has its copy.
        """
        self._copied.wait()

    def finish(self) -> None:
        """Wait for the save in progress. Raises CheckpointError, on every rank, if it failed on a rank."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """`finish`, then end the thread."""
        try:
            self.finish()
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _open(self) -> None:
        if self._writers is not None:
            return
        self._writers = dist.new_group(backend="gloo", timeout=self._timeout)
        if self.background:
            self._watchers = dist.new_group(backend="gloo", timeout=self._timeout)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def _write_both(self, root: Path, snapshot: Snapshot, export: Export | None, started: float) -> None:
        """The background thread's work: collective over the writers' group only."""
        try:
            self._hold(root, snapshot)
            self._write(root, snapshot, started)
        except CheckpointError:
            if export is not None:
                export.discard()
            raise
        if export is not None:
            self._finish_export(export)

    def _hold(self, root: Path, snapshot: Snapshot) -> None:
        """Copy the live tensors, and let training change them."""

        def copy() -> None:
            try:
                snapshot.prepared.copy_to_host()
            finally:
                self._copied.set()

        try:
            run_on_all_ranks(copy, self._writers)
        except CheckpointError as error:
            raise self._failed(root, snapshot, error) from error

    def _write(self, root: Path, snapshot: Snapshot, started: float) -> None:
        """Write the snapshot's files, then the tracker file."""
        partial = folder.partial_path(root, snapshot.iteration)
        try:
            checksums = io.write(snapshot.prepared, partial, self._writers)
            self._after()
            if self._awaited is not None:
                self._awaited.wait(self._writers)
            run_on_rank_zero(lambda: self._complete(root, partial, snapshot, checksums, started), self._writers)
            self.completed = snapshot.iteration
        except CheckpointError as error:
            raise self._failed(root, snapshot, error) from error

    def _failed(self, root: Path, snapshot: Snapshot, error: CheckpointError) -> CheckpointError:
        """Remove the files of the save; returns the error to raise. Collective over the writers' group."""
        run_on_rank_zero(lambda: folder.discard(root, snapshot.iteration), self._writers)
        name = folder.folder_name(snapshot.iteration)
        return CheckpointError(
            f"saving {root / name} failed, older checkpoints are untouched: {error}; of these"
            f" {folder.newest(root)}: free some disk space and restart with the same command"
        )

    def _begin_export(self, make: Callable[[], Export]) -> Export:
        export = run_on_all_ranks(make, self._writers)
        run_on_rank_zero(export.begin, self._writers)
        try:
            run_on_all_ranks(lambda: export.collect(copy=self.background), self._writers)
        except CheckpointError:
            export.discard()
            raise
        return export

    def _finish_export(self, export: Export) -> None:
        try:
            run_on_all_ranks(export.write, self._writers)
            run_on_rank_zero(export.commit, self._writers)
        except CheckpointError as error:
            export.discard()
            raise CheckpointError(f"exporting to {export.path} failed, the checkpoint is complete: {error}") from error
        if dist.get_rank() == 0:
            _logger.info("%s is complete", export.path)

    def _complete(
        self, root: Path, partial: Path, snapshot: Snapshot, checksums: Mapping[str, Checksums], started: float
    ) -> None:
        io.write_common(snapshot.prepared, partial)
        if snapshot.data_state:
            folder.write_data_state(partial, snapshot.data_state)
        folder.write_checksums(partial, checksums)
        folder.write_manifest(partial, snapshot.iteration, **snapshot.about)
        final = folder.commit(root, snapshot.iteration)
        _logger.info("%s is complete after %.2f s", final, time.perf_counter() - started)
        self._retention.apply(root, snapshot.iteration)


class ModelExporter:
    """Creates the exports of a run; each rank gathers every tensor of the whole model once."""

    def __init__(
        self,
        template: str,
        origin: Path,
        spec: ModelSpec,
        stages: Sequence[GPTModel],
        parallel: ParallelState,
        *,
        value_head: bool = False,
    ) -> None:
        """`template` is --save-hf, `origin` the folder of --hf-checkpoint; `value_head`: the model is a reward model.

        Raises FileNotFoundError or ValueError if `origin` lacks weights or is another model.
        """
        self._stages, self._parallel = stages, parallel
        self._spec, self._family = spec, family_for(read_hf_config(origin))
        self._value_head = value_head
        ranks = {"rank": parallel.rank, "world_size": parallel.world_size}
        self._plan = HfPlan(origin, self._spec, self._family, **ranks, value_head=value_head)
        self._template = template

    def export(self, rollout_id: int) -> HfExport:
        """The export of the weights after `rollout_id`. Raises as `HfExport` if its folder cannot be written."""
        return HfExport(self._plan, Path(self._template.replace("{rollout_id}", str(rollout_id))), self._tensors)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter_hf_tensors(
            self._stages, self._spec, self._family, **groups_of(self._parallel), value_head=self._value_head
        )


class AdapterExporter:
    """Creates the exports of a run with LoRA adapters: PEFT folders, which rank 0 writes."""

    def __init__(
        self,
        template: str,
        adapters: AdapterConfig,
        origin: Path,
        spec: ModelSpec,
        stages: Sequence[GPTModel],
        parallel: ParallelState,
    ) -> None:
        """`template` is that of the folders, `origin` the folder of --hf-checkpoint, which they name as their base."""
        self._template, self._stages, self._parallel, self._spec = template, stages, parallel, spec
        family = family_for(read_hf_config(origin))
        self._mapping = AdapterMapping.of(family, adapters)
        self._config = peft_config(adapters, str(origin), has_tower=family.tower is not None)

    def export(self, rollout_id: int) -> PeftExport:
        """The export of the adapters after `rollout_id`. Raises as `PeftExport` if its folder cannot be written."""
        folder = Path(self._template.replace("{rollout_id}", str(rollout_id)))
        return PeftExport(folder, self._config, self._parallel.rank, self._tensors)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter_hf_tensors(
            self._stages, self._spec, self._mapping, **groups_of(self._parallel), receivers={RANK_ZERO}
        )


class MergedExporter:
    """Creates the exports of a run whose adapters are merged: the whole model, and a PEFT folder beside it."""

    def __init__(self, model: ModelExporter, adapters: AdapterExporter) -> None:
        self._model, self._adapters = model, adapters

    def export(self, rollout_id: int) -> Export:
        """Both after `rollout_id`. Raises as either if its folder cannot be written."""
        return ExportPair(self._model.export(rollout_id), self._adapters.export(rollout_id))
