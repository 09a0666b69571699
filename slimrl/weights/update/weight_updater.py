"""`WeightUpdater`: loads the trained weights into every inference server under a new version.

Order of an update: servers pause (running requests end, or wait like new ones) and flush the KV cache; they read each
bucket while the trainer packs the next; when every server has all buckets, each gets the new version; when each reports
it, all resume. Servers with pipeline stages then generate one token, which proves that their later stages have read the
buckets. A failed update is retried from its beginning; if the retries fail, all servers stay paused. Nothing is ever
sampled from a partial update or from two versions.
Collective over all trainer ranks; an error on one rank is raised on all. Called by the train workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from slimrl.engines.server_protocol import RunningRequests, WeightControl
from slimrl.models.families import ModelMapping, family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.observability.tracer import Timeline
from slimrl.platform.collective_errors import RANK_ZERO, RankSync
from slimrl.weights.hf_checkpoint import read_hf_config
from slimrl.weights.update.announcements import Announcements, divided_announcements
from slimrl.weights.update.buckets import BucketSpace, Transport, TransportGroup, iter_buckets
from slimrl.weights.update.engine_fanout import EngineCalls, WeightSyncError, connect
from slimrl.weights.update.export import groups_of, iter_hf_tensors
from slimrl.weights.update.topology import (
    EngineEndpoint,
    RankGroups,
    SenderMap,
    check_without_stages,
    colocated_senders,
    export_ranks,
    split_senders,
)
from slimrl.weights.update.transport_changed_files import ChangedFiles, file_transport
from slimrl.weights.update.transport_disk import Delivery, post_write
from slimrl.weights.update.transport_distributed import DistributedTransport
from slimrl.weights.update.transport_tensor import EngineLink, TensorTransport
from slimrl.weights.update.verify import Manifest, check_servers, expected_checksums

if TYPE_CHECKING:
    from slimrl.arguments import Arguments

__all__ = ["EngineEndpoint", "ModelSource", "WeightUpdateReport", "WeightSyncError", "WeightUpdater"]

TIMEOUT_S = 300.0  # longest wait for one bucket or one response
BUCKET_BYTES = 512 * 1024**2
ATTEMPTS = 3  # of one weight update, while every server answers
PAUSE_BETWEEN_S = 1.0  # a server that is shutting down answers for a moment longer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class WeightUpdateReport:
    """Cost of one weight update: bytes and buckets of the rank that sent most, and total seconds.

    `check_seconds` of them are the full check; `attempts` is 1 unless an attempt failed.
    """

    bytes: int
    buckets: int
    seconds: float
    check_seconds: float
    attempts: int


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """The model's metadata that the updater needs besides its tensors."""

    spec: ModelSpec
    family: ModelMapping
    parallel: RankGroups
    merge_adapters: bool = True  # LoRA adapters of the model, into its weights


class WeightUpdater:
    """Created by `create` (or `colocated`, `split`, `disk`), collectively over all trainer ranks."""

    def __init__(
        self,
        source: ModelSource,
        servers: Sequence[WeightControl],
        engine_sizes: Sequence[int],
        transports: Sequence[Transport],
        senders: set[int],
        bucket_bytes: int,
        with_stages: Sequence[int] = (),
        pause_between_s: float = PAUSE_BETWEEN_S,
        timeline: Timeline | None = None,
    ) -> None:
        """`transports` are this rank's, shared memory first; `senders` are all ranks that have transports.

        `with_stages` are the indices of servers with pipeline stages; `pause_between_s` is the wait between attempts.
        """
        self._source = source
        self._servers = servers
        self._engine_sizes = engine_sizes
        self._transports = transports
        self._bucket_bytes = bucket_bytes
        self._pause_between_s = pause_between_s
        self._timeline = timeline if timeline is not None else Timeline.off()
        self._ranks = RankSync(source.parallel.rank, WeightSyncError)
        self._calls = EngineCalls(servers, with_stages, source.parallel.rank, self._ranks, self._timeline)
        self._partners = self._find_partners()
        self._senders = senders
        self._delivery: Delivery | None = None  # of files
        self._announcements: Announcements | None = None  # divided over the ranks

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
        """The updater for the flags: shared memory with --colocate, otherwise broadcast, or files."""
        source = ModelSource(ModelSpec.from_args(args), family_for(read_hf_config(Path(args.hf_checkpoint))), parallel)
        bucket_bytes = args.update_weight_buffer_size
        if args.update_weight_transport == "disk":
            assert args.update_weight_disk_dir is not None
            return cls.disk(
                source,
                engines,
                Path(args.update_weight_disk_dir),
                post_write(args.custom_update_weight_post_write_path, engines, hook_args=args),
                changes=ChangedFiles.from_args(args),
                every_rank=args.every_rank_loads_files,
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
        """Engines on the trainer's GPUs get references to shared memory; on CUDA, engines elsewhere get a broadcast."""
        device = source.parallel.device
        sender_map = colocated_senders(engines, source.parallel.world_size, host_memory=device.type == "cpu")
        return cls._from_sender_map(source, engines, sender_map, bucket_bytes, timeout_s, timeline)

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
        return cls._from_sender_map(source, engines, split_senders(engines), bucket_bytes, timeout_s, timeline)

    @classmethod
    def disk(
        cls,
        source: ModelSource,
        engines: Sequence[EngineEndpoint],
        folder: Path,
        post_write: Callable[[Path], None] | None = None,
        *,
        changes: ChangedFiles | None = None,
        every_rank: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
        timeline: Timeline | None = None,
    ) -> WeightUpdater:
        """Trainer rank 0 writes Hugging Face files into `folder`, and every engine reads them.

        In between, every rank calls `post_write` with the folder of the weight update. With `changes` it has what
        changed (`DeltaUpdater`). With that or `every_rank` the servers have slimrl's loader.
        """
        check_without_stages(engines)
        servers, sizes = connect(engines, timeout_s, timeline)
        made, load = file_transport(servers, engines, folder, source.parallel.device, changes, every_rank=every_rank)
        lead = made if source.parallel.rank == RANK_ZERO else None
        updater = cls(source, servers, sizes, [lead] if lead else [], {RANK_ZERO}, bucket_bytes, timeline=timeline)
        updater._delivery = Delivery(updater._ranks, updater._calls, lead, post_write, load)
        return updater

    @classmethod
    def _from_sender_map(
        cls,
        source: ModelSource,
        engines: Sequence[EngineEndpoint],
        sender_map: SenderMap,
        bucket_bytes: int,
        timeout_s: float,
        timeline: Timeline | None,
    ) -> WeightUpdater:
        servers, sizes = connect(engines, timeout_s, timeline)
        rank, device = source.parallel.rank, source.parallel.device
        links = []
        for number, senders in sender_map.sharing.items():
            # every rank takes part in making each group, members or not
            members = sorted(set(senders))
            group = dist.new_group(members, backend="gloo") if len(members) > 1 else None
            if rank in members:
                links.append(EngineLink(servers[number], sizes[number], senders, group, sum(sizes[:number])))
        transports: list[Transport] = [TensorTransport(links, device)] if links else []
        remote, remote_sizes = [servers[n] for n in sender_map.remote], [sizes[n] for n in sender_map.remote]
        divided = divided_announcements(remote, rank, source.parallel.world_size, timeout_s)
        if remote and rank == RANK_ZERO:
            transports.append(DistributedTransport(remote, remote_sizes, device, timeout_s, divided))
        with_stages = [number for number, engine in enumerate(engines) if engine.has_stages]
        updater = cls(
            source, servers, sizes, transports, sender_map.senders, bucket_bytes, with_stages, PAUSE_BETWEEN_S, timeline
        )
        updater._announcements = divided
        return updater

    def update_weights(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        version: str,
        check_equal: bool = False,
        running: RunningRequests = "abort",
    ) -> WeightUpdateReport:
        """Loads the weights of `model` into every server; collective over all trainer ranks.

        `model` is this rank's bare GPTModel, or its virtual stages. With `check_equal` every tensor in every server is
        compared with the trainer's before any server resumes. Running requests are returned ("abort") or resume with
        the new weights and a recomputed KV cache ("retract"). A failed weight update is attempted up to `ATTEMPTS`
        times, while all servers answer. Raises WeightSyncError, on every rank, with the reason and the state of each
        server. No server resumes then, unless all had the new version and some failed to resume.
        """
        started = time.monotonic()
        attempt, done = 1, None
        while done is None:
            try:
                done = self._attempt(model, version, check_equal, running)
            except WeightSyncError as error:
                self._after_failure(error, version, attempt)
                attempt += 1
        sent, check_seconds, failure = done
        if failure is not None:
            raise WeightSyncError(failure[0], final=failure[1])
        for transport in self._transports:
            transport.release()
        return WeightUpdateReport(*sent, time.monotonic() - started, check_seconds, attempt)

    def close(self) -> None:
        """Leaves the groups with servers and frees shared memory; this rank only."""
        for transport in self._transports:
            transport.close()

    def close_collective(self) -> None:
        """`close`, and leaves the updater's process groups, so that another updater can follow. Collective."""
        self.close()
        dist.barrier()  # after it no rank needs a message of those groups any more
        self._ranks.close()
        for transport in self._transports:
            transport.leave()

    def _attempt(
        self, model: nn.Module | Sequence[nn.Module], version: str, check_equal: bool, running: RunningRequests
    ) -> tuple[tuple[int, int], float, tuple[str, bool] | None]:
        """Loads the weights into every server; all resume once all have them.

        Returns (bytes, buckets), the seconds of the check, and the failure to resume (message, whether it is final).
        """
        self._timeline.mark("stop servers")
        self._calls.begin(running)
        self._prepare(model)
        self._timeline.mark("send buckets")
        if self._delivery is not None:
            self._delivery.begin(version)
        sent = max(self._ranks.run_on_all_ranks(lambda: self._send_announced(model)))
        if self._delivery is not None:
            self._delivery.finish()
        started = time.monotonic()
        if check_equal:
            self._timeline.mark("check equality")
            self._ranks.run_on_all_ranks(lambda: self._check_equal(model))
        check_seconds = time.monotonic() - started
        self._timeline.mark("commit")
        return sent, check_seconds, self._calls.commit_and_resume(version, running)

    def _prepare(self, model: nn.Module | Sequence[nn.Module]) -> None:
        """What a kind of update needs before it sends, once all servers are paused; collective."""

    def _after_failure(self, error: WeightSyncError, version: str, attempt: int) -> None:
        """Returns if another attempt makes sense, else raises. Collective: `error.final` is the same on every rank."""
        for transport in self._transports:
            transport.reset()
        states = self._calls.states()
        if error.final or attempt == ATTEMPTS or any(state.error is not None for state in states):
            raise WeightSyncError(
                f"weight version {version!r} was not loaded by every server ({attempt} of {ATTEMPTS} attempts),"
                f" {self._calls.consequence}: {error}; {', '.join(str(state) for state in states)}",
                final=True,
            ) from error
        logger.warning("attempt %d to update to weight version %s failed, retrying: %s", attempt, version, error)
        time.sleep(self._pause_between_s)

    def _send_announced(self, model: nn.Module | Sequence[nn.Module]) -> tuple[int, int]:
        """`_send`, in which this rank also announces the buckets of rank 0 to its share of many servers."""
        with contextlib.nullcontext() if self._announcements is None else self._announcements.round():
            return self._send(model)

    def _send(self, model: nn.Module | Sequence[nn.Module]) -> tuple[int, int]:
        """Sends every bucket; returns (bytes, buckets) of this rank.

        After a failure this rank still gathers to the end, because the other ranks of its groups wait for it. Raises
        WeightSyncError, and ValueError if the sent tensors differ from the mapping.
        """
        if not self._senders & self._partners:
            return 0, 0
        space = BucketSpace(self._source.parallel.device)
        tensors = self._export(model, self._senders, self._source, space)
        try:
            return self._send_buckets(tensors, space) if self._transports else (0, 0)
        finally:
            for _ in tensors:
                pass

    def _send_buckets(self, tensors: Iterator[tuple[str, Tensor]], space: BucketSpace) -> tuple[int, int]:
        num_bytes = buckets = 0
        transports, manifest = TransportGroup(self._transports), Manifest(self._source.family, self._source.spec)
        fused, buffer = self._source.family.names_with_next(self._source.spec), self._transports[0].buffer
        for bucket in iter_buckets(tensors, self._bucket_bytes, buffer, fused, space=space, opens=self._opens):
            num_bytes, buckets = num_bytes + bucket.nbytes, buckets + 1
            manifest.check_off(bucket)
            transports.run(lambda transport: transport.finish())
            transports.run(lambda transport, bucket=bucket: transport.start(bucket))  # type: ignore[misc]
        transports.run(lambda transport: transport.finish())
        transports.raise_first()
        manifest.close()
        return num_bytes, buckets

    def _opens(self, tensor: Tensor) -> bool:
        """Whether every server can open the tensor's own memory."""
        return all(transport.opens(tensor) for transport in self._transports)

    def _check_equal(self, model: nn.Module | Sequence[nn.Module]) -> None:
        self._compare(model, self._source)

    def _compare(self, model: nn.Module | Sequence[nn.Module], source: ModelSource) -> None:
        """Raises WeightSyncError naming the servers whose weights differ from those of `source`."""
        if RANK_ZERO not in self._partners:
            return
        tensors = self._export(model, {RANK_ZERO}, source)
        if source.parallel.rank != RANK_ZERO:
            for _ in tensors:
                pass
            return
        sizes, on_host = self._engine_sizes, source.parallel.device.type == "cpu"
        check_servers(
            self._servers,
            sizes,
            lambda: expected_checksums(tensors, source.spec, source.family, sizes, on_host=on_host),
        )

    def _export(
        self,
        model: nn.Module | Sequence[nn.Module],
        receivers: set[int],
        source: ModelSource,
        space: BucketSpace | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """(HF name, tensor) of the whole model on the `receivers`; collective over `_partners`."""
        return iter_hf_tensors(
            model,
            source.spec,
            source.family,
            **groups_of(source.parallel),
            receivers=receivers,
            space=space,
            merge_adapters=source.merge_adapters,
        )

    def _find_partners(self) -> set[int]:
        """The ranks that export together with this one; collective over all ranks."""
        parallel = self._source.parallel
        groups = (parallel.tp_group, parallel.pp_group, parallel.ep_group, parallel.etp_group)
        own = [dist.get_process_group_ranks(group) for group in groups]
        return export_ranks(parallel.rank, [ranks for groups in self._ranks.gather(own) for ranks in groups])
