"""`WeightUpdater`: brings the trained weights into every inference server under a new version.

Order of an update: servers pause (running requests end, or wait like new ones) and drop cached keys and values; they
read the buckets, the next of which is packed meanwhile; only when every server has them all, they get the new version,
and only when each reports it, they resume. A server with pipeline stages is asked for a token then: its later stages
read in their own time, and that proves that they have. A failed update is sent again from its beginning, and where that
does not help either, all servers stay paused: nothing is ever sampled from half of an update, nor from two versions.
Collective over all trainer ranks; an error on one rank is raised on all. Called by the train workers.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from slimrl.engines.sglang.control import RunningRequests
from slimrl.engines.sglang.control import ServerControl as SglangServerControl
from slimrl.models.families import ModelMapping, family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.observability.tracer import Timeline
from slimrl.platform.collective_errors import RANK_ZERO, RankSync
from slimrl.weights.hf_checkpoint import read_hf_config
from slimrl.weights.update.buckets import Transport, TransportGroup, iter_buckets
from slimrl.weights.update.engine_control import ServerControl, WeightSyncError, on_all, states, traced
from slimrl.weights.update.export import iter_hf_tensors
from slimrl.weights.update.topology import (
    EngineEndpoint,
    RankGroups,
    SenderMap,
    check_without_stages,
    colocated_roles,
    partners,
    split_roles,
)
from slimrl.weights.update.transport_disk import Delivery, DiskTransport, post_write
from slimrl.weights.update.transport_distributed import DistributedTransport
from slimrl.weights.update.transport_tensor import EngineLink, TensorTransport
from slimrl.weights.update.verify import Manifest, check_server, expected_checksums

if TYPE_CHECKING:
    from slimrl.arguments import Arguments

__all__ = ["EngineEndpoint", "ModelSource", "WeightUpdateReport", "WeightSyncError", "WeightUpdater"]

TIMEOUT_S = 300.0  # longest wait for one bucket or one answer
BUCKET_BYTES = 512 * 1024**2
ATTEMPTS = 3  # of one weight update, while every server answers
PAUSE_BETWEEN_S = 1.0  # a server that is about to end needs a moment until it no longer answers

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class WeightUpdateReport:
    """What one weight update took: bytes and buckets of the rank that sent most, seconds for all of it.

    `check_seconds` of them went into the proof of equality; `attempts` is 1 unless something failed on the way.
    """

    bytes: int
    buckets: int
    seconds: float
    check_seconds: float
    attempts: int


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """What the updater must know of the model besides its tensors."""

    spec: ModelSpec
    family: ModelMapping
    parallel: RankGroups


class WeightUpdater:
    """Made by `create` (or `colocated`, `split`, `disk`), collectively over all trainer ranks."""

    def __init__(
        self,
        source: ModelSource,
        servers: Sequence[ServerControl],
        engine_sizes: Sequence[int],
        transports: Sequence[Transport],
        senders: set[int],
        bucket_bytes: int,
        with_stages: Sequence[int] = (),
        pause_between_s: float = PAUSE_BETWEEN_S,
        timeline: Timeline | None = None,
    ) -> None:
        """`transports` are this rank's own, shared memory first; `senders` are all ranks that have any.

        `with_stages` are the numbers of the servers with pipeline stages, `pause_between_s` is between two attempts.
        """
        self._source = source
        self._servers = servers
        self._engine_sizes = engine_sizes
        self._with_stages = [servers[number] for number in with_stages]
        self._transports = transports
        self._bucket_bytes = bucket_bytes
        self._pause_between_s = pause_between_s
        self._timeline = timeline if timeline is not None else Timeline.off()
        self._ranks = RankSync(source.parallel.rank, WeightSyncError)
        self._partners = self._find_partners()
        self._senders = senders
        self._delivery: Delivery | None = None  # of files

    @classmethod
    def create(
        cls,
        args: Arguments,
        parallel: RankGroups,
        engines: Sequence[EngineEndpoint],
        *,
        timeout_s: float = TIMEOUT_S,
        timeline: Timeline | None = None,
    ) -> WeightUpdater:
        """The updater that the flags ask for: shared memory with --colocate, else broadcast, or files."""
        source = ModelSource(ModelSpec.from_args(args), family_for(read_hf_config(Path(args.hf_checkpoint))), parallel)
        bucket_bytes = args.update_weight_buffer_size
        if args.update_weight_transport == "disk":
            assert args.update_weight_disk_dir is not None
            folder = Path(args.update_weight_disk_dir)
            return cls.disk(
                source,
                engines,
                folder,
                post_write(args, engines),
                bucket_bytes=bucket_bytes,
                timeout_s=timeout_s,
                timeline=timeline,
            )
        make = cls.colocated if args.colocate else cls.split
        return make(source, engines, bucket_bytes=bucket_bytes, timeout_s=timeout_s, timeline=timeline)

    @classmethod
    def colocated(
        cls,
        source: ModelSource,
        engines: Sequence[EngineEndpoint],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
        timeline: Timeline | None = None,
    ) -> WeightUpdater:
        """Engines on the trainer's GPUs get references to shared memory; engines elsewhere, on CUDA, a broadcast."""
        device = source.parallel.device
        roles = colocated_roles(engines, source.parallel.world_size, host_memory=device.type == "cpu")
        return cls._from_roles(source, engines, roles, bucket_bytes, timeout_s, timeline)

    @classmethod
    def split(
        cls,
        source: ModelSource,
        engines: Sequence[EngineEndpoint],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
        timeline: Timeline | None = None,
    ) -> WeightUpdater:
        """Every engine gets broadcasts from trainer rank 0."""
        return cls._from_roles(source, engines, split_roles(engines), bucket_bytes, timeout_s, timeline)

    @classmethod
    def disk(
        cls,
        source: ModelSource,
        engines: Sequence[EngineEndpoint],
        folder: Path,
        post_write: Callable[[Path], None] | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
        timeline: Timeline | None = None,
    ) -> WeightUpdater:
        """Trainer rank 0 writes Hugging Face files into `folder`, and every engine reads them.

        In between `post_write` is called on every rank, with the folder of the weight update.
        """
        check_without_stages(engines)
        servers, sizes = _connect(engines, timeout_s, timeline)
        leads = source.parallel.rank == RANK_ZERO
        transports = [DiskTransport(servers, folder, source.parallel.device)] if leads else []
        made = cls(source, servers, sizes, transports, {RANK_ZERO}, bucket_bytes, timeline=timeline)
        made._delivery = Delivery(made._ranks, transports[0] if leads else None, post_write)
        return made

    @classmethod
    def _from_roles(
        cls,
        source: ModelSource,
        engines: Sequence[EngineEndpoint],
        roles: SenderMap,
        bucket_bytes: int,
        timeout_s: float,
        timeline: Timeline | None,
    ) -> WeightUpdater:
        servers, sizes = _connect(engines, timeout_s, timeline)
        rank, device = source.parallel.rank, source.parallel.device
        links = []
        for number, senders in roles.sharing.items():
            # every rank takes part in making each group, members or not
            members = sorted(set(senders))
            group = dist.new_group(members, backend="gloo") if len(members) > 1 else None
            if rank in members:
                links.append(EngineLink(servers[number], sizes[number], senders, group))
        transports: list[Transport] = [TensorTransport(links, device)] if links else []
        if roles.remote and rank == RANK_ZERO:
            remote, remote_sizes = [servers[n] for n in roles.remote], [sizes[n] for n in roles.remote]
            transports.append(DistributedTransport(remote, remote_sizes, device, timeout_s))
        with_stages = [number for number, engine in enumerate(engines) if engine.has_stages]
        return cls(
            source, servers, sizes, transports, roles.senders, bucket_bytes, with_stages, PAUSE_BETWEEN_S, timeline
        )

    def update_weights(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        version: str,
        check_equal: bool = False,
        running: RunningRequests = "abort",
    ) -> WeightUpdateReport:
        """Brings the weights of `model` into every server; collective over all trainer ranks.

        `model` is what this rank holds: a bare GPTModel, or its virtual stages. With `check_equal` every tensor in
        every server is compared with the trainer's before any server continues. Running requests are given back
        ("abort") or continue with the new weights and recomputed keys and values ("retract"). A weight update that
        fails is repeated up to `ATTEMPTS` times, while all servers answer. Raises WeightSyncError, on every rank, with
        the reason and with how each server stands; no server continues then.
        """
        started = time.monotonic()
        attempt, done = 1, None
        while done is None:
            try:
                done = self._attempt(model, version, check_equal, running)
            except WeightSyncError as error:
                self._after_failure(error, version, attempt)
                attempt += 1
        self._timeline.mark("servers continue")
        self._ranks.run_on_rank_zero(self._go_on)
        for transport in self._transports:
            transport.release()
        sent, check_seconds = done
        return WeightUpdateReport(*sent, time.monotonic() - started, check_seconds, attempt)

    def close(self) -> None:
        """Leaves what was joined and frees shared memory; this rank only."""
        for transport in self._transports:
            transport.close()

    def retire(self) -> None:
        """`close`, and leaves the process groups that were made for it: another updater follows. Collective."""
        self.close()
        dist.barrier()  # whoever is here needs no message of those groups any more
        self._ranks.close()
        for transport in self._transports:
            transport.leave()

    def _attempt(
        self, model: nn.Module | Sequence[nn.Module], version: str, check_equal: bool, running: RunningRequests
    ) -> tuple[tuple[int, int], float]:
        """Brings the weights into every server, all of which stay stopped; ((bytes, buckets), seconds of the check)."""
        self._timeline.mark("stop servers")
        self._ranks.run_on_rank_zero(lambda: self._begin(running))
        self._timeline.mark("send buckets")
        if self._delivery is not None:
            self._delivery.begin(version)
        sent = max(self._ranks.run_on_all_ranks(lambda: self._send(model)))
        if self._delivery is not None:
            self._delivery.finish()
        started = time.monotonic()
        if check_equal:
            self._timeline.mark("check equality")
            self._ranks.run_on_all_ranks(lambda: self._check_equal(model))
        check_seconds = time.monotonic() - started
        self._timeline.mark("commit")
        self._ranks.run_on_rank_zero(lambda: self._commit(version, running))
        return sent, check_seconds

    def _after_failure(self, error: WeightSyncError, version: str, attempt: int) -> None:
        """Returns where another attempt makes sense. Collective: every rank has the same `error.final`."""
        for transport in self._transports:
            transport.reset()
        stand = self._ranks.run_on_rank_zero(lambda: states(self._servers))
        if error.final or attempt == ATTEMPTS or any(state.silence is not None for state in stand):
            raise WeightSyncError(
                f"weight version {version!r} did not get into every server ({attempt} of {ATTEMPTS} attempts), so no"
                f" server continues: {error}; {', '.join(str(state) for state in stand)}",
                final=True,
            ) from error
        logger.warning("attempt %d to update to weight version %s failed and is repeated: %s", attempt, version, error)
        time.sleep(self._pause_between_s)

    def _begin(self, running: RunningRequests) -> None:
        on_all(self._servers, lambda server: server.begin_weight_update(running), "stopping for new weights")

    def _commit(self, version: str, running: RunningRequests) -> None:
        on_all(self._servers, lambda server: server.commit_weight_update(version, running), "naming the new weights")
        reported = on_all(self._servers, lambda server: server.weight_version(), "asking for the weight version")
        other = {server.url: found for server, found in zip(self._servers, reported, strict=True) if found != version}
        if other:
            names = ", ".join(f"{url} reports {found!r}" for url, found in other.items())
            raise WeightSyncError(
                f"after the update to weight version {version!r}, {names}: its weights are not the new"
            )

    def _go_on(self) -> None:
        """All servers hold the same version now: one that fails here leaves no mixture behind."""
        on_all(self._servers, lambda server: server.continue_(), "continuing with new weights")
        on_all(self._with_stages, lambda server: server.settle(), "waiting for the later pipeline stages")

    def _send(self, model: nn.Module | Sequence[nn.Module]) -> tuple[int, int]:
        """Sends every bucket; (bytes, buckets) of this rank.

        After a failure this rank still gathers to the end, because the others of its group wait for it. Raises
        WeightSyncError, and ValueError where other tensors were sent than the table names.
        """
        if not self._senders & self._partners:
            return 0, 0
        tensors = self._export(model, self._senders)
        try:
            return self._send_buckets(tensors) if self._transports else (0, 0)
        finally:
            for _ in tensors:
                pass

    def _send_buckets(self, tensors: Iterator[tuple[str, Tensor]]) -> tuple[int, int]:
        num_bytes = buckets = 0
        family, spec = self._source.family, self._source.spec
        lanes, manifest = TransportGroup(self._transports), Manifest(family, spec)
        together = family.names_with_next(spec)
        for bucket in iter_buckets(tensors, self._bucket_bytes, self._transports[0].buffer, together):
            num_bytes, buckets = num_bytes + bucket.flat.numel(), buckets + 1
            manifest.check_off(bucket)
            lanes.run(lambda transport: transport.finish())
            lanes.run(lambda transport, bucket=bucket: transport.start(bucket))  # type: ignore[misc]
        lanes.run(lambda transport: transport.finish())
        lanes.raise_first()
        manifest.close()
        return num_bytes, buckets

    def _check_equal(self, model: nn.Module | Sequence[nn.Module]) -> None:
        if RANK_ZERO not in self._partners:
            return
        source = self._source
        tensors = self._export(model, {RANK_ZERO})
        if source.parallel.rank != RANK_ZERO:
            for _ in tensors:
                pass
            return
        on_host = source.parallel.device.type == "cpu"
        expected = expected_checksums(tensors, source.spec, source.family, self._engine_sizes, on_host=on_host)
        reports = on_all(self._servers, lambda server: server.weights_checksum(), "computing checksums")
        wrong = []
        for server, size, report in zip(self._servers, self._engine_sizes, reports, strict=True):
            try:
                check_server(server.url, report, expected[size])
            except WeightSyncError as error:
                wrong.append(str(error))
        if wrong:
            raise WeightSyncError("; ".join(wrong))

    def _export(self, model: nn.Module | Sequence[nn.Module], receivers: set[int]) -> Iterator[tuple[str, Tensor]]:
        """(HF name, tensor) of the whole model on the `receivers`; collective over this rank's partners."""
        spec, family, parallel = self._source.spec, self._source.family, self._source.parallel
        return iter_hf_tensors(
            model,
            spec,
            family,
            parallel.tp_group,
            pp_group=parallel.pp_group,
            ep_group=parallel.ep_group,
            etp_group=parallel.etp_group,
            receivers=receivers,
        )

    def _find_partners(self) -> set[int]:
        """The ranks that take part in an export together with this one; collective over all ranks."""
        parallel = self._source.parallel
        groups = (parallel.tp_group, parallel.pp_group, parallel.ep_group, parallel.etp_group)
        own = [dist.get_process_group_ranks(group) for group in groups]
        return partners(parallel.rank, [ranks for groups in self._ranks.gather(own) for ranks in groups])


def _connect(
    engines: Sequence[EngineEndpoint], timeout_s: float, timeline: Timeline | None
) -> tuple[list[ServerControl], list[int]]:
    """A control for each engine, and its tensor-parallel size."""
    controls: list[ServerControl] = [SglangServerControl(e.url, timeout_s, e.key) for e in engines]
    if timeline is not None:
        controls = [traced(control, timeline) for control in controls]
    return controls, [e.tensor_parallel for e in engines]
