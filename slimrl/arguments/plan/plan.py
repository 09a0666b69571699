"""`Plan`: everything that a run would do, gathered from checked flags, the machine and the files it starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from slimrl.arguments.hf_files import HfFiles, bytes_per_weight, read_hf_files
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.plan.batch import Batches, MicroBatch, batches, largest_micro_batch
from slimrl.arguments.plan.checkpoints import Start, start_of
from slimrl.arguments.plan.engine_memory import EngineSettings
from slimrl.arguments.plan.engines import Server, server_defaults, servers
from slimrl.arguments.plan.hook_places import HookPlace, hook_places
from slimrl.arguments.plan.layout import Groups, Placement, groups_of, placement
from slimrl.arguments.plan.machine import Machine
from slimrl.arguments.plan.memory import MemoryPlan, estimate
from slimrl.arguments.plan.parameters import active_parameters, selection_biases, total_parameters
from slimrl.arguments.plan.shape import Shape, shape_of
from slimrl.processes.memory import GIB

MANY_LAYERS = 10**6  # all of a model that is not trained


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a plan is made for. `nodes` has the slots of each node of a running Ray cluster, None where there is none.

    `server_words` is what the servers are started with on this machine before anything the user says ("--device=cpu").
    """

    machine: Machine
    nodes: Sequence[int] | None = None
    server_words: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class SlotMemory:
    """Memory of one slot (bytes), and in words who says so; `shared` where all slots draw on one machine's memory."""

    bytes: int
    source: str
    shared: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """The whole plan; `start` is None without training, `hf_files` None where the folder holds no weights."""

    args: Arguments
    entry: str
    surroundings: Surroundings
    shape: Shape
    placement: Placement
    groups: Groups
    batches: Batches
    micro_batch: MicroBatch
    start: Start | None
    hooks: list[HookPlace]
    servers: list[Server]
    hf_files: HfFiles | None
    total_parameters: int
    active_parameters: int
    checkpoint_elements: int  # what the checkpoint's files must hold
    slot: SlotMemory | None
    engine_settings: EngineSettings
    memory: MemoryPlan
    reward_weights: int | None  # of one slot of the reward model, bytes; None without one that is started

    @property
    def colocated(self) -> bool:
        """Whether a slot has both roles."""
        return bool(self.args.colocate and self.placement.train and self.placement.engines)

    @property
    def takes_turns(self) -> bool:
        """Whether one role leaves the slot's memory while the other works."""
        return bool(self.args.offload_train and self.args.offload_rollout)


def make_plan(args: Arguments, entry: str, surroundings: Surroundings) -> Plan:
    """The plan of a checked command line. Raises UnreadableFileError where a weights file is broken."""
    shape, groups = shape_of(args), groups_of(args)
    where = placement(args, surroundings.nodes)
    folder = Path(args.hf_checkpoint)
    files = read_hf_files(folder, layers=shape.layers, tied=shape.tied)
    slot = slot_memory(args, where, surroundings)
    total = total_parameters(shape)
    options = {**server_defaults(surroundings.server_words), **args.sglang_options}
    settings = EngineSettings.from_options(options, weight_bytes=bytes_per_weight(folder, files, total))
    slot_bytes = None if slot is None or slot.shared else slot.bytes
    return Plan(
        args=args,
        entry=entry,
        surroundings=surroundings,
        shape=shape,
        placement=where,
        groups=groups,
        batches=batches(args, groups),
        micro_batch=largest_micro_batch(args, groups),
        start=None if args.debug_rollout_only else start_of(args),
        hooks=hook_places(args),
        servers=servers(args, where),
        hf_files=files,
        total_parameters=total,
        active_parameters=active_parameters(shape),
        checkpoint_elements=total + selection_biases(shape),
        slot=slot,
        engine_settings=settings,
        memory=estimate(args, slot_bytes=slot_bytes, engine=settings),
        reward_weights=_reward_weights(args, surroundings) if where.reward else None,
    )


def _reward_weights(args: Arguments, surroundings: Surroundings) -> int:
    """What a slot of the reward model's servers holds of its weights: as in the files, or in the dtype asked for."""
    files = read_hf_files(Path(args.rm_model), layers=MANY_LAYERS, tied=False)
    if files is None:
        return 0
    options = {**server_defaults(surroundings.server_words), **args.rm_server_options}
    per_element = EngineSettings.from_options(options, weight_bytes=0.0).weight_bytes
    size = files.bytes if not per_element or files.elements is None else int(files.elements * per_element)
    return size // args.rm_num_gpus_per_engine


def slot_memory(args: Arguments, where: Placement, surroundings: Surroundings) -> SlotMemory | None:
    """What one slot has: as --slot-memory-gib says, else a GPU, else this machine's memory by its slots."""
    machine = surroundings.machine
    if args.slot_memory_gib is not None:
        return SlotMemory(int(args.slot_memory_gib * GIB), "--slot-memory-gib", shared=False)
    if machine.gpus:
        return SlotMemory(min(machine.gpus), "nvidia-smi", shared=False)
    if machine.host is None or where.total == 0:
        return None
    here = where.total if surroundings.nodes is None else max(where.on_node(place.node) for place in where.places)
    return SlotMemory(machine.host // here, f"this machine's {machine.host / GIB:.1f} GiB / {here} slots", shared=True)
