"""`WeightUpdater`: brings the trained weights into every inference server under a new version.

Order of a push: servers stop (running requests end, new ones wait) and forget cached keys and values; they take
all buckets; only when every server has them all, they get the new version and go on, and each must report it. A server
with pipeline stages is asked for a token then: its later stages read in their own time, and that proves that they have.
On an error they stay stopped, so that nothing is sampled from half of an update. Collective over all trainer
ranks, and an error on one rank is raised on all. Called by the train workers.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from slimrl.sglang.control import ServerControl as SglangServerControl
from slimrl.weights.buckets import Bucket, BufferSource, iter_buckets
from slimrl.weights.equality import check_server, expected_checksums
from slimrl.weights.export import iter_hf_tensors
from slimrl.weights.families import Family, family_for
from slimrl.weights.hf_files import read_hf_config
from slimrl.weights.roles import (
    EngineEndpoint,
    Roles,
    check_without_stages,
    colocated_roles,
    partners,
    split_roles,
)
from slimrl.weights.servers import ServerControl, WeightSyncError, on_all
from slimrl.weights.shape import ModelShape
from slimrl.weights.transport_disk import DiskTransport
from slimrl.weights.transport_distributed import DistributedTransport
from slimrl.weights.transport_tensor import EngineLink, TensorTransport

if TYPE_CHECKING:
    from slimrl.arguments import Arguments
    from slimrl.megatron.parallel import ParallelState

__all__ = ["EngineEndpoint", "ModelSource", "PushReport", "WeightSyncError", "WeightUpdater"]

TIMEOUT_S = 300.0  # longest wait for one bucket or one answer
BUCKET_BYTES = 512 * 1024**2
LEAD = 0  # the trainer rank that asks servers for versions and checksums

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class PushReport:
    """What one push took: bytes and buckets of the rank that sent most, seconds for all of it."""

    bytes: int
    seconds: float
    buckets: int


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """What the updater must know of the model besides its tensors."""

    shape: ModelShape
    family: Family
    parallel: ParallelState


class Transport(Protocol):
    """One way to bring buckets to some of the servers."""

    buffer: BufferSource

    def send(self, bucket: Bucket, version: str | None) -> None:
        """Returns once the bucket may be overwritten; raises WeightSyncError naming the server that failed."""

    def release(self) -> None:
        """Gives up what was kept for later pipeline stages of the servers: every one has read it."""

    def close(self) -> None:
        """Gives up what stays open between pushes."""


class WeightUpdater:
    """Make it by `create` (or `colocated`, `split`, `disk`), collectively over all trainer ranks; `push` often."""

    def __init__(
        self,
        source: ModelSource,
        servers: Sequence[ServerControl],
        engine_sizes: Sequence[int],
        transports: Sequence[Transport],
        senders: set[int],
        bucket_bytes: int,
        with_stages: Sequence[int] = (),
    ) -> None:
        """`transports` are this rank's own, shared memory first; `senders` are all ranks that have any.

        `with_stages` are the numbers of the servers with pipeline stages.
        """
        self._source = source
        self._servers = servers
        self._engine_sizes = engine_sizes
        self._with_stages = [servers[number] for number in with_stages]
        self._transports = transports
        self._bucket_bytes = bucket_bytes
        self._everyone = dist.new_group(backend="gloo")
        self._partners = self._find_partners()
        self._senders = senders

    @classmethod
    def create(
        cls,
        args: Arguments,
        parallel: ParallelState,
        engines: Sequence[EngineEndpoint],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> WeightUpdater:
        """The updater that the flags ask for: shared memory with --colocate, else broadcast, or files."""
        source = ModelSource(ModelShape.from_args(args), family_for(read_hf_config(Path(args.hf_checkpoint))), parallel)
        bucket_bytes = args.update_weight_buffer_size
        if args.update_weight_transport == "disk":
            folder = Path(args.update_weight_disk_dir)
            return cls.disk(source, engines, folder, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        make = cls.colocated if args.colocate else cls.split
        return make(source, engines, bucket_bytes=bucket_bytes, timeout_s=timeout_s)

    @classmethod
    def colocated(
        cls,
        source: ModelSource,
        engines: Sequence[EngineEndpoint],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
    ) -> WeightUpdater:
        """Engines on the trainer's slots get references to shared memory; engines elsewhere, on CUDA, a broadcast."""
        device = source.parallel.device
        roles = colocated_roles(engines, source.parallel.world_size, host_memory=device.type == "cpu")
        return cls._from_roles(source, engines, roles, bucket_bytes, timeout_s)

    @classmethod
    def split(
        cls,
        source: ModelSource,
        engines: Sequence[EngineEndpoint],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
    ) -> WeightUpdater:
        """Every engine gets broadcasts from trainer rank 0."""
        return cls._from_roles(source, engines, split_roles(engines), bucket_bytes, timeout_s)

    @classmethod
    def disk(
        cls,
        source: ModelSource,
        engines: Sequence[EngineEndpoint],
        folder: Path,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
    ) -> WeightUpdater:
        """Trainer rank 0 writes Hugging Face files into `folder`, and every engine reads them."""
        check_without_stages(engines)
        servers, sizes = _connect(engines, timeout_s)
        leads = source.parallel.rank == LEAD
        transports = [DiskTransport(servers, folder, source.parallel.device)] if leads else []
        return cls(source, servers, sizes, transports, {LEAD}, bucket_bytes)

    @classmethod
    def _from_roles(
        cls,
        source: ModelSource,
        engines: Sequence[EngineEndpoint],
        roles: Roles,
        bucket_bytes: int,
        timeout_s: float,
    ) -> WeightUpdater:
        servers, sizes = _connect(engines, timeout_s)
        rank, device = source.parallel.rank, source.parallel.device
        links = []
        for number, suppliers in roles.sharing.items():
            # every rank takes part in making each group, members or not
            members = sorted(set(suppliers))
            group = dist.new_group(members, backend="gloo") if len(members) > 1 else None
            if rank in members:
                links.append(EngineLink(servers[number], sizes[number], suppliers, group))
        transports: list[Transport] = [TensorTransport(links, device)] if links else []
        if roles.remote and rank == LEAD:
            remote, remote_sizes = [servers[n] for n in roles.remote], [sizes[n] for n in roles.remote]
            transports.append(DistributedTransport(remote, remote_sizes, device, timeout_s))
        with_stages = [number for number, engine in enumerate(engines) if engine.has_stages]
        return cls(source, servers, sizes, transports, roles.senders, bucket_bytes, with_stages)

    def push(self, model: nn.Module | Sequence[nn.Module], *, version: str, check_equal: bool = False) -> PushReport:
        """Brings the weights of `model` into every server; collective over all trainer ranks.

        `model` is what this rank holds: a bare GPTModel, or its virtual stages.
        Raises WeightSyncError, on every rank, naming each server that failed or does not report `version`
        afterwards; with `check_equal` also where any tensor in a server differs from the trainer's.
        """
        started = time.monotonic()
        self._together(self._begin, lead_only=True)
        sent = self._together(lambda: self._send(model, version))
        self._together(lambda: self._end(version), lead_only=True)
        for transport in self._transports:
            transport.release()
        if check_equal:
            self._together(lambda: self._check_equal(model))
        num_bytes, buckets = max(part for part in sent if part is not None)
        return PushReport(num_bytes, time.monotonic() - started, buckets)

    def close(self) -> None:
        """Leaves what was joined and frees shared memory; this rank only."""
        for transport in self._transports:
            transport.close()

    def _begin(self) -> None:
        on_all(self._servers, lambda server: server.begin_weight_update(), "stopping for new weights")

    def _end(self, version: str) -> None:
        on_all(self._servers, lambda server: server.end_weight_update(version), "going on with new weights")
        on_all(self._with_stages, lambda server: server.settle(), "waiting for the later pipeline stages")
        reported = on_all(self._servers, lambda server: server.weight_version(), "asking for the weight version")
        other = {server.url: found for server, found in zip(self._servers, reported, strict=True) if found != version}
        if other:
            names = ", ".join(f"{url} reports {found!r}" for url, found in other.items())
            raise WeightSyncError(f"after the push of weight version {version!r}, {names}: its weights are not the new")

    def _send(self, model: nn.Module | Sequence[nn.Module], version: str) -> tuple[int, int]:
        """Sends every bucket; (bytes, buckets) of this rank.

        After a failure this rank still gathers to the end, because the others of its group wait for it.
        """
        num_bytes = buckets = 0
        if not self._senders & self._partners:
            return num_bytes, buckets
        tensors = self._export(model)
        if not self._transports:
            for _ in tensors:
                pass
            return num_bytes, buckets
        working = list(self._transports)
        errors: list[WeightSyncError] = []
        together = self._source.family.names_with_next(self._source.shape)
        for bucket in iter_buckets(tensors, self._bucket_bytes, self._transports[0].buffer, together):
            num_bytes, buckets = num_bytes + bucket.flat.numel(), buckets + 1
            for transport in tuple(working):
                try:
                    transport.send(bucket, version if bucket.last else None)
                except WeightSyncError as error:
                    working.remove(transport)
                    errors.append(error)
        if errors:
            raise errors[0]
        return num_bytes, buckets

    def _check_equal(self, model: nn.Module | Sequence[nn.Module]) -> None:
        if LEAD not in self._partners:
            return
        source = self._source
        tensors = self._export(model)
        if source.parallel.rank != LEAD:
            for _ in tensors:
                pass
            return
        on_host = source.parallel.device.type == "cpu"
        expected = expected_checksums(tensors, source.shape, source.family, self._engine_sizes, on_host=on_host)
        reports = on_all(self._servers, lambda server: server.weights_checksum(), "computing checksums")
        for server, size, report in zip(self._servers, self._engine_sizes, reports, strict=True):
            check_server(server.url, report, expected[size])

    def _export(self, model: nn.Module | Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """(HF name, tensor) of the whole model; collective over this rank's partners."""
        shape, family, parallel = self._source.shape, self._source.family, self._source.parallel
        return iter_hf_tensors(
            model,
            shape,
            family,
            parallel.tp_group,
            pp_group=parallel.pp_group,
            ep_group=parallel.ep_group,
            etp_group=parallel.etp_group,
        )

    def _find_partners(self) -> set[int]:
        """The ranks that take part in an export together with this one; collective over all ranks."""
        parallel = self._source.parallel
        groups = (parallel.tp_group, parallel.pp_group, parallel.ep_group, parallel.etp_group)
        own = [dist.get_process_group_ranks(group) for group in groups]
        everyones: list[list[list[int]]] = [own] * self._everyone.size()
        dist.all_gather_object(everyones, own, group=self._everyone)
        return partners(parallel.rank, [ranks for groups in everyones for ranks in groups])

    def _together(self, step: Callable[[], Result], *, lead_only: bool = False) -> list[Result | None]:
        """Runs `step` on every rank (or only on the lead); an error on one becomes an error on all.

        Returns what each rank's step returned.
        """
        result = error = None
        if not lead_only or self._source.parallel.rank == LEAD:
            try:
                result = step()
            except (WeightSyncError, ValueError, OSError) as failure:
                error = failure
        outcomes: list[tuple[Result | None, str | None]] = [(None, None)] * self._everyone.size()
        dist.all_gather_object(outcomes, (result, None if error is None else str(error)), group=self._everyone)
        if error is not None:
            raise error
        if failed := next((text for _, text in outcomes if text is not None), None):
            raise WeightSyncError(failed)
        return [outcome for outcome, _ in outcomes]


def _connect(engines: Sequence[EngineEndpoint], timeout_s: float) -> tuple[list[ServerControl], list[int]]:
    """A control for each engine, and its tensor-parallel size."""
    return [SglangServerControl(e.url, timeout_s) for e in engines], [e.tensor_parallel for e in engines]
