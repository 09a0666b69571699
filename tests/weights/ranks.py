"""Jobs that the slow tests run inside trainer ranks. Each function leaves torch.distributed closed."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimrl.arguments import Arguments
from slimrl.models.families import family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.platform.launch_env import RunFacts, nccl_environment, this_machine
from slimrl.weights.convert.hf_to_megatron import load_hf_checkpoint
from slimrl.weights.hf_checkpoint import HfCheckpoint, read_hf_config
from slimrl.weights.update.engine_fanout import ENGINES_OF_ONE_RANK
from slimrl.weights.update.shared_memory import shared_copies
from slimrl.weights.update.topology import EngineEndpoint
from tests.mooncake import use_here

if TYPE_CHECKING:
    from torch import nn

    from slimrl.weights.update.transport_changed_files import ChangedFiles
    from slimrl.weights.update.weight_updater import WeightUpdateReport

BUCKET_BYTES = 20_000  # many small buckets, and an embedding larger than one


def share(built: nn.Module) -> None:
    """Moves the weights into shared memory, as those of a colocated trainer."""
    parameters = list(built.parameters())
    for parameter, copy in zip(parameters, shared_copies(parameters), strict=True):
        parameter.data = copy


def weight_updates(
    rank: int,
    world_size: int,
    init_method: str,
    args: Arguments,
    hf_dir: Path,
    engines: list[EngineEndpoint],
    way: str,
    versions: list[str],
    folder: Path,
    check_equal: bool = True,
    left: list[EngineEndpoint] | None = None,
    shared: bool = False,
) -> list[WeightUpdateReport | str]:
    """Loads `hf_dir` into a Megatron model and updates the engines from it under each version, `way` being a
    constructor's name, p2p, files (disk, with an answer of every rank of a server), or divided: a broadcast of which
    each rank tells its share of the servers.

    Returns the report of each weight update, or the text of its error. `shared`: the weights are in shared memory, as
    those of a colocated trainer. With `left`, another updater updates those
    engines at the end.
    """
    from slimrl.megatron import parallel
    from slimrl.megatron.model import model_builder
    from slimrl.weights.point_to_point.updater import PointToPointUpdater
    from slimrl.weights.update import weight_updater
    from slimrl.weights.update.announcements import divided_announcements
    from slimrl.weights.update.weight_updater import ModelSource, WeightSyncError, WeightUpdater

    few = 1 if way == "divided" else ENGINES_OF_ONE_RANK  # as if there were many servers
    weight_updater.divided_announcements = functools.partial(divided_announcements, of_one_rank=few)
    options: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "timeout_s": 60}
    if way == "files":
        options["every_rank"] = True
    way = {"divided": "split", "files": "disk"}.get(way, way)
    # the environment of a run's rank: NCCL reads it when it creates its first communicator
    run = RunFacts(broadcasts_weights=way in ("split", "p2p"))
    os.environ.update(nccl_environment(this_machine(), run, given={}, inherited=os.environ))
    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    shape, family = ModelSpec.from_args(args), family_for(read_hf_config(hf_dir))
    built = model_builder.build_model(args, state)
    places = {key: getattr(state, key) for key in ("tp_rank", "tp_size", "etp_rank", "etp_size")}
    load_hf_checkpoint(built, shape, family, hf_dir, **places)
    if shared:
        share(built)
    make = PointToPointUpdater if way == "p2p" else getattr(WeightUpdater, way)
    more = (folder,) if way == "disk" else ()
    updater = make(ModelSource(shape, family, state), engines, *more, **options)
    results: list[WeightUpdateReport | str] = []
    for version in [*versions, *(["left"] if left else [])]:
        if version == "left":
            updater.close_collective()
            updater = make(ModelSource(shape, family, state), left, *more, **options)
        try:
            results.append(updater.update_weights(built, version=version, check_equal=check_equal))
        except WeightSyncError as error:
            results.append(str(error))
    updater.close()
    parallel.shutdown()
    return results


def update_weights(
    rank: int,
    world_size: int,
    init_method: str,
    args: Arguments,
    hf_dir: Path,
    engines: list[EngineEndpoint],
    way: str,
    version: str,
    folder: Path,
) -> tuple[int, int] | str:
    """One of `weight_updates`: (bytes, buckets), or the text of the error."""
    # servers report the checksums of their first pipeline stage only
    check_equal = not any(engine.has_stages for engine in engines)
    (result,) = weight_updates(
        rank, world_size, init_method, args, hf_dir, engines, way, [version], folder, check_equal
    )
    return result if isinstance(result, str) else (result.bytes, result.buckets)


@dataclasses.dataclass(frozen=True)
class Step:
    """One weight update of `delta_updates`: the part of the elements that changes, and what goes wrong before it."""

    part: float = 0.0
    forget: bool = False  # the updater knows nothing of the last update, as after a failed attempt
    lose: Path | None = None  # folder that is removed: the checkpoint of an engine's host
    damage: bool = False  # the first files, or changes of a bucket, that are written get another bit


def damage_changes(damaged: list[bool]) -> None:
    """Makes the changes of the next bucket get another bit whenever `damaged` is true; then it becomes false."""
    from slimrl.weights.update import transport_delta

    described = transport_delta.described

    def with_other_bit(deltas: Any) -> Any:
        parts = described(deltas)
        if damaged[0]:
            parts["values"][-1] ^= 1
        damaged[0] = False
        return parts

    transport_delta.described = with_other_bit


def delta_updates(
    rank: int,
    world_size: int,
    init_method: str,
    args: Arguments,
    hf_dir: Path,
    engines: list[EngineEndpoint],
    steps: list[Step],
    changes: ChangedFiles | None = None,
    folder: Path | None = None,
    pause_between_s: float = 0.2,
    way: str = "split",
) -> list[WeightUpdateReport]:
    """Updates the engines by `DeltaUpdater`, each time with full checks; in files of `folder` if there is one.

    `way` is else the name of a constructor, or divided (see `weight_updates`); colocated has its weights in shared
    memory.
    """
    import torch
    import xxhash

    from slimrl.megatron import parallel
    from slimrl.megatron.model import model_builder
    from slimrl.weights.update import weight_updater
    from slimrl.weights.update.announcements import divided_announcements
    from slimrl.weights.update.transport_delta import DeltaUpdater
    from slimrl.weights.update.weight_updater import ModelSource

    if way == "divided":
        weight_updater.divided_announcements = functools.partial(divided_announcements, of_one_rank=1)
    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    spec, family = ModelSpec.from_args(args), family_for(read_hf_config(hf_dir))
    built = model_builder.build_model(args, state)
    places = {key: getattr(state, key) for key in ("tp_rank", "tp_size", "etp_rank", "etp_size")}
    load_hf_checkpoint(built, spec, family, hf_dir, **places)
    source, damaged = ModelSource(spec, family, state), [False]
    damage_changes(damaged)
    if way == "colocated":
        share(built)

    def damage(published: Path) -> None:
        if damaged[0] and rank == 0:
            path = max(published.glob("*.safetensors"), key=lambda path: path.stat().st_size)
            data = bytearray(path.read_bytes())
            data[-2] ^= 1
            path.write_bytes(data)
        damaged[0] = False

    sizes = {"bucket_bytes": BUCKET_BYTES, "timeout_s": 60}
    if folder is None:
        make = DeltaUpdater.colocated if way == "colocated" else DeltaUpdater.split
        updater = make(source, engines, **sizes)
    else:
        updater = DeltaUpdater.disk(source, engines, folder, damage, changes=changes, **sizes)
    updater._pause_between_s = pause_between_s
    results = []
    for version, step in enumerate(steps):
        damaged[0] = step.damage
        if step.forget:
            for transport in updater._transports:
                transport.reset()
        if step.lose is not None and rank == 0:
            shutil.rmtree(step.lose)
        for name, parameter in built.named_parameters():  # a weight that is whole on every rank changes alike
            generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{version} {name}".encode()) >> 1)
            chosen = torch.rand(parameter.shape, generator=generator) < step.part
            parameter.data[chosen] += 0.25
        results.append(updater.update_weights(built, version=str(version + 1), check_equal=True))
    updater.close()
    parallel.shutdown()
    return results


def delta_updates_from(
    rank: int,
    world_size: int,
    init_method: str,
    args: Arguments,
    hf_dirs: list[Path],
    engines: list[EngineEndpoint],
) -> list[WeightUpdateReport | str]:
    """Updates the engines from each of `hf_dirs` by one `DeltaUpdater`, with full checks.

    Returns the report of each weight update, or the text of its error.
    """
    from slimrl.megatron import parallel
    from slimrl.megatron.model import model_builder
    from slimrl.weights.update.transport_delta import DeltaUpdater
    from slimrl.weights.update.weight_updater import ModelSource, WeightSyncError

    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    spec, family = ModelSpec.from_args(args), family_for(read_hf_config(hf_dirs[0]))
    built = model_builder.build_model(args, state)
    places = {key: getattr(state, key) for key in ("tp_rank", "tp_size", "etp_rank", "etp_size")}
    updater = DeltaUpdater.split(ModelSource(spec, family, state), engines, bucket_bytes=BUCKET_BYTES, timeout_s=60)
    results: list[WeightUpdateReport | str] = []
    for version, hf_dir in enumerate(hf_dirs):
        load_hf_checkpoint(built, spec, family, hf_dir, **places)
        try:
            results.append(updater.update_weights(built, version=f"{hf_dir.name}.{version}", check_equal=True))
        except WeightSyncError as error:
            results.append(str(error))
    updater.close()
    parallel.shutdown()
    return results


def point_to_point_updates(
    rank: int,
    world_size: int,
    init_method: str,
    args: Arguments,
    hf_dirs: list[Path],
    engines: list[EngineEndpoint],
    transport: str = "nccl",
    environment: dict[str, str] | None = None,
    buffer_bytes: int = BUCKET_BYTES,
) -> list[WeightUpdateReport | str]:
    """Updates the engines from each of `hf_dirs` by `PointToPointUpdater`, with full checks; adapters are random.

    `environment` is that of Mooncake. Returns the report of each weight update, or the text of its error.
    """
    import torch
    import xxhash

    from slimrl.megatron import parallel
    from slimrl.megatron.model import model_builder
    from slimrl.weights.point_to_point.updater import PointToPointUpdater
    from slimrl.weights.reshard import global_tensors
    from slimrl.weights.update.weight_updater import ModelSource, WeightSyncError

    use_here(environment or {})
    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    spec, family = ModelSpec.from_args(args), family_for(read_hf_config(hf_dirs[0]))
    built = model_builder.build_model(args, state)
    places = {key: getattr(state, key) for key in ("tp_rank", "tp_size", "etp_rank", "etp_size")}
    source = ModelSource(spec, family, state)
    updater = PointToPointUpdater(source, engines, transport=transport, bucket_bytes=buffer_bytes, timeout_s=60)
    results: list[WeightUpdateReport | str] = []
    for version, hf_dir in enumerate(hf_dirs):
        load_hf_checkpoint(built, spec, family, hf_dir, **places)
        for name, adapter in global_tensors(built, adapters=True).items():
            generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
            adapter.data.copy_(torch.randn(adapter.shape, generator=generator))
        try:
            results.append(updater.update_weights(built, version=str(version + 1), check_equal=True))
        except WeightSyncError as error:
            results.append(str(error))
    updater.close()
    parallel.shutdown()
    return results


def adapter_update(
    rank: int, world_size: int, init_method: str, args: Arguments, hf_dir: Path, engines: list[EngineEndpoint]
) -> WeightUpdateReport | str:
    """One update by `AdapterUpdater`, of adapters on the base in `hf_dir`; its report, or the text of its error."""
    from slimrl.megatron import parallel
    from slimrl.megatron.model import model_builder
    from slimrl.models.adapters import AdapterConfig
    from slimrl.weights.adapters import initialize_adapters
    from slimrl.weights.update.adapter_updater import AdapterUpdater
    from slimrl.weights.update.weight_updater import ModelSource, WeightSyncError

    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    spec, family, adapters = (
        ModelSpec.from_args(args),
        family_for(read_hf_config(hf_dir)),
        AdapterConfig.from_args(args),
    )
    assert adapters is not None
    built = model_builder.build_model(args, state)
    places = {key: getattr(state, key) for key in ("tp_rank", "tp_size", "etp_rank", "etp_size")}
    load_hf_checkpoint(built, spec, family, hf_dir, **places)
    initialize_adapters(built, 1, tp_rank=state.tp_rank, tp_size=state.tp_size)
    base = ModelSource(spec, family, state, merge_adapters=False)
    updater = AdapterUpdater(base, adapters, engines, BUCKET_BYTES, timeout_s=60)
    try:
        return updater.update_weights(built, version="1", check_equal=True)
    except WeightSyncError as error:
        return str(error)
    finally:
        updater.close()
        parallel.shutdown()


def export_to(
    rank: int, world_size: int, init_method: str, args: Arguments, hf_dir: Path, receivers: set[int] | None
) -> tuple[int, list[str], int, int, int]:
    """Exports a model loaded from `hf_dir`.

    Returns (received tensors, names of those that differ from the folder's, bytes of tensors held here, bytes of
    broadcasts that this rank took part in, number of its gathers).
    """
    from unittest import mock

    import torch
    import torch.distributed as dist

    from slimrl.megatron import parallel
    from slimrl.megatron.model import model_builder
    from slimrl.weights.reshard import global_tensors
    from slimrl.weights.update.export import iter_hf_tensors

    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    shape, family = ModelSpec.from_args(args), family_for(read_hf_config(hf_dir))
    built = model_builder.build_model(args, state)
    places = {key: getattr(state, key) for key in ("tp_rank", "tp_size", "etp_rank", "etp_size")}
    load_hf_checkpoint(built, shape, family, hf_dir, **places)
    groups = {f"{axis}_group": getattr(state, f"{axis}_group") for axis in ("pp", "ep", "etp")}
    came, different = 0, []
    with (
        HfCheckpoint(hf_dir) as checkpoint,
        mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast,
        mock.patch.object(dist, "gather", wraps=dist.gather) as gather,
        mock.patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as gather_to_all,
    ):
        for name, tensor in iter_hf_tensors(built, shape, family, state.tp_group, **groups, receivers=receivers):
            came += 1
            different += [] if torch.equal(tensor, checkpoint.tensor(name)) else [name]
    held = sum(tensor.nbytes for tensor in global_tensors(built).values())
    brought = sum(call.args[0].nbytes for call in broadcast.call_args_list)
    parallel.shutdown()
    return came, different, held, brought, gather.call_count + gather_to_all.call_count
