"""GPUs: a placement group with one bundle per GPU (or logical GPU), in a stable order over the nodes.

The order is by node, then by GPU number. Engines take consecutive GPUs: an engine is on one node, or on whole nodes
with the same number of GPUs on each. The driver places all actors by this order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slimrl.arguments import Arguments
from slimrl.arguments.engine_groups import draft_folder, frozen_places, group_flags, policy_places
from slimrl.arguments.hf_config import reward_gpus
from slimrl.cluster.ray_session import InsufficientGpusError

# Fractions of one GPU: a train worker, an engine and a server of the reward model can share it (colocated), beside the
# probe that finds it in the place of a lost one.
TRAIN_SHARE = 0.55
ENGINE_SHARE = 0.3
REWARD_SHARE = 0.1
PROBE_SHARE = 0.05
PLACEMENT_TIMEOUT_S = 600.0
LOSS_NOTICED_S = 120.0  # by Ray, of a node that does not answer
SPARE_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class PlacementPlan:
    """The number of reserved GPUs, and those of training, rollout and the reward model (indices in GPU order).

    `train` are those of the policy, which may also train the critic; `critic` those of a critic by itself. Each engine
    takes `per_engine` consecutive rollout GPUs, unless `policy_servers` has the GPUs of each; `frozen_servers` has the
    GPUs of the frozen models' servers, `reward_servers` those of the reward model or teachers.
    """

    total: int
    train: range
    rollout: range
    per_engine: int
    reward_servers: tuple[range, ...] = ()
    critic: range = range(0)
    policy_servers: tuple[range, ...] | None = None
    frozen_servers: tuple[range, ...] = ()
    frozen_names: tuple[str, ...] = ()  # the model of each
    drafts: int = 0  # servers of the policy with a draft model

    @property
    def engine_ranges(self) -> tuple[range, ...]:
        """The GPUs of each engine that gets weight updates."""
        if self.policy_servers is not None:
            return self.policy_servers
        size = self.per_engine
        return tuple(range(first, first + size) for first in range(self.rollout.start, self.rollout.stop, size))

    @property
    def reward(self) -> range:
        """The GPUs of all servers of the reward model or teachers."""
        servers = self.reward_servers
        return range(servers[0].start, servers[-1].stop) if servers else range(0)

    @property
    def sentence(self) -> str:
        """The number of workers and GPUs that a run starts."""
        critic = f", {len(self.critic)} critic workers" if self.critic else ""
        counts = Counter(self.frozen_names)
        frozen = [f"{_servers(count)} of the frozen model {name}" for name, count in counts.items()]
        if self.drafts:
            frozen.append(f"a draft model in {_servers(self.drafts)} of the policy")
        none = f"; {', '.join(frozen)}, which {'gets' if len(frozen) == 1 else 'get'} no weight updates"
        return f"{len(self.train)} train workers{critic} and {len(self.rollout)} rollout GPUs{none if frozen else ''}"


def _servers(count: int) -> str:
    return "1 server" if count == 1 else f"{count} servers"


def plan_gpus(args: Arguments) -> PlacementPlan:
    """Colocated: training and rollout start at GPU 0. Separate: training first, then rollout.

    A critic with GPUs of its own follows the policy. The reward model comes last, with --rm-colocate it starts at GPU
    0.
    """
    train = 0 if args.debug_rollout_only else args.actor_num_gpus
    critic = range(train, train + args.critic_num_gpus)
    rollout = 0 if args.debug_train_only else args.rollout_gpus
    per_engine = args.rollout_num_gpus_per_engine
    first = 0 if args.colocate else critic.stop
    others = max(critic.stop, first + rollout)
    reward = reward_gpus(args, others)
    total = max(others, *(servers.stop for servers in reward), 0)
    policy = policy_places(args, first)
    options = [group_flags(args, place.model, place.group).sglang_options for place in policy]
    frozen = frozen_places(args, first)
    return PlacementPlan(
        total,
        range(train),
        range(first, first + rollout),
        per_engine,
        reward,
        critic,
        tuple(place.gpus for place in policy),
        tuple(place.gpus for place in frozen),
        tuple(place.model.name for place in frozen),
        sum(draft_folder(one) is not None for one in options),
    )


@dataclasses.dataclass(frozen=True)
class GpuBundle:
    """One reserved (logical) GPU: its bundle, its node and its GPU's number on that node.

    `gpu_id` is the UUID if the node's CUDA_VISIBLE_DEVICES lists UUIDs. `node` is Ray's node id: one machine can have
    several nodes.
    """

    bundle: int
    node: str
    node_ip: str
    gpu_id: int | str


def in_order(gpus: Iterable[GpuBundle]) -> list[GpuBundle]:
    """The GPUs sorted by node (address), then by GPU number."""

    def key(gpu: GpuBundle) -> tuple[int, str, bool, int | str]:
        return int(ipaddress.ip_address(gpu.node_ip)), gpu.node, isinstance(gpu.gpu_id, str), gpu.gpu_id

    return sorted(gpus, key=key)


@dataclasses.dataclass(frozen=True)
class EnginePart:
    """The GPUs of one engine on one node (indices in GPU order), in the order of the engine's ranks."""

    node: str
    gpus: tuple[int, ...]


def engine_parts(engine_ranges: Sequence[range], gpus: Sequence[GpuBundle]) -> list[list[EnginePart]]:
    """For each engine, its part on each of its nodes; `gpus` are all reserved GPUs, in order.

    Raises InsufficientGpusError if an engine spans several nodes without filling each with the same number of GPUs.
    """
    on_node = Counter(gpu.node for gpu in gpus)
    engines: list[list[EnginePart]] = []
    for indices in engine_ranges:
        by_node: dict[str, list[int]] = {}
        for index in indices:
            by_node.setdefault(gpus[index].node, []).append(index)
        parts = [EnginePart(node, tuple(own)) for node, own in by_node.items()]
        whole = all(len(part.gpus) == on_node[part.node] for part in parts)
        if len(parts) > 1 and not (whole and len({len(part.gpus) for part in parts}) == 1):
            raise InsufficientGpusError(_straddling(len(engines), parts, gpus, on_node))
        engines.append(parts)
    return engines


def _straddling(index: int, parts: list[EnginePart], gpus: Sequence[GpuBundle], on_node: Counter[str]) -> str:
    shares = ", ".join(
        f"{len(part.gpus)} of the {on_node[part.node]} on {gpus[part.gpus[0]].node_ip}" for part in parts
    )
    return (
        f"engine {index} would get {shares}: an engine must be on one node or fill whole nodes of equal size; free the"
        " nodes that other jobs use, or choose training GPUs and --rollout-num-gpus-per-engine so that engines end at"
        " node boundaries"
    )


# max_calls: an actor can have the process afterwards, which Ray would otherwise end because the task has a GPU
@ray.remote(num_cpus=0, num_gpus=PROBE_SHARE, max_calls=0, max_retries=0)
def _location() -> tuple[str, str, int | str]:
    """Node id, address, and GPU number or UUID of the bundle that this runs on."""
    found = ray.get_gpu_ids()
    # a logical GPU has no number where an empty CUDA_VISIBLE_DEVICES is inherited
    gpu = str(found[0]) if found else "0"
    number = int(gpu) if gpu.isdigit() else gpu
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), number


class ReservedGpus(Protocol):
    """GPUs that actors can be placed on."""

    @property
    def gpus(self) -> Sequence[GpuBundle] | Mapping[int, GpuBundle]:
        """Each GPU by its index in the run's GPU order."""

    def options(self, index: int, share: float) -> dict[str, object]:
        """Ray options that place an actor on GPU `index`, taking `share` of it."""
        ...

    def follow(self) -> list[GpuBundle]:
        """Takes over the GPUs that Ray has reserved in the place of those of lost nodes; returns the new ones."""
        ...

    def lost(self, indices: Collection[int]) -> list[int]:
        """Those of these GPUs whose node is lost and not replaced."""
        ...


def gpus_of_nodes() -> dict[str, int]:
    """The number of Ray's GPUs by node id, reserved or not."""
    return {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]}


def _options(group: PlacementGroup, bundle: int, share: float) -> dict[str, object]:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return {"num_cpus": 0, "num_gpus": share, "scheduling_strategy": strategy}


def _locations(group: PlacementGroup, bundles: Iterable[int]) -> list[ray.ObjectRef]:
    """The location of each of these bundles, once Ray has a process there."""
    return [_location.options(**_options(group, bundle, PROBE_SHARE)).remote() for bundle in bundles]


def _living_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


class GpuBundles:
    """The reserved GPUs, in order, so that consecutive GPUs share a node.

    `engines` are the parts of each engine, one per node; `frozen_engines` and `reward_engines` those of the servers of
    frozen models and of the reward model.
    """

    def __init__(self, plan: PlacementPlan) -> None:
        """Reserves `plan.total` GPUs.

        Raises TimeoutError if Ray cannot place them, InsufficientGpusError if the engines do not fit them.
        """
        self.plan = plan
        self._moving = threading.Lock()  # probes of two calls at once could wait for each other
        self.group: PlacementGroup = placement_group([{"GPU": 1}] * plan.total, strategy="PACK")
        if not self.group.wait(PLACEMENT_TIMEOUT_S):
            remove_placement_group(self.group)
            raise TimeoutError(
                f"Ray did not free {plan.total} GPUs within {PLACEMENT_TIMEOUT_S:.0f} s: another job holds them;"
                " see `ray status`"
            )
        self.gpus = self._locate(range(self.group.bundle_count))
        try:
            self.engines = engine_parts(plan.engine_ranges, self.gpus)
            self.frozen_engines = engine_parts(plan.frozen_servers, self.gpus)
            self.reward_engines = engine_parts(plan.reward_servers, self.gpus)
        except InsufficientGpusError:
            self.release()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_moving"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _moving=threading.Lock())

    def _locate(self, bundles: Sequence[int], timeout_s: float | None = None) -> list[GpuBundle]:
        """The GPUs that these bundles have now, in order. Raises a RayError if a node is lost, or after `timeout_s`."""
        asked = _locations(self.group, bundles)
        try:
            locations = ray.get(asked, timeout=timeout_s)
        except RayError:
            for one in asked:
                ray.cancel(one, force=True)
            raise
        return in_order(GpuBundle(bundle, *location) for bundle, location in zip(bundles, locations, strict=True))

    def options(self, index: int, share: float) -> dict[str, object]:
        """As `ReservedGpus.options`."""
        return _options(self.group, self.gpus[index].bundle, share)

    def relocate(self, *, node_is_lost: bool) -> list[GpuBundle]:
        """Takes over the GPUs that Ray has reserved in the place of those of lost nodes with training ranks.

        Returns the new ones. The GPUs of a lost node keep their indices. With `node_is_lost` waits until Ray has
        noticed the loss too. Raises InsufficientGpusError if no node has as many free GPUs, or if those of one node
        would be on several.
        """
        deadline = time.monotonic() + (LOSS_NOTICED_S if node_is_lost else 0.0)
        while not (lost := self.lost(self.beside_training())):
            if time.monotonic() >= deadline:
                return []
            time.sleep(0.2)
        deadline = time.monotonic() + SPARE_TIMEOUT_S
        while not self._is_placed():
            if time.monotonic() > deadline:
                raise InsufficientGpusError(
                    f"no other node has {len(lost)} free GPUs for the {len(lost)} of {self.gpus[lost[0]].node_ip}"
                )
            time.sleep(0.2)
        return self._move(lost)

    def beside_training(self) -> set[int]:
        """The GPUs of all nodes that have training ranks, those of servers too."""
        training = {self.gpus[index].node for index in (*self.plan.train, *self.plan.critic)}
        return {index for index, gpu in enumerate(self.gpus) if gpu.node in training}

    def follow(self, indices: Collection[int] | None = None) -> list[GpuBundle]:
        """As `ReservedGpus.follow`, of these indices only if given. Raises InsufficientGpusError as `relocate` does."""
        lost = self.lost(range(len(self.gpus)) if indices is None else indices)
        return self._move(lost) if lost and self._is_placed() else []

    def has_moved(self, node: str) -> bool:
        """Whether Ray has reserved other GPUs for all that the run has on this node, whose loss it has noticed then."""
        places, alive = placement_group_table(self.group)["bundles_to_node_id"], _living_nodes() - {node}
        own = [gpu.bundle for gpu in self.gpus if gpu.node == node]
        return bool(own) and all(places.get(bundle) in alive for bundle in own)

    def lost(self, indices: Collection[int]) -> list[int]:
        """As `ReservedGpus.lost`."""
        alive = _living_nodes()
        return [index for index, gpu in enumerate(self.gpus) if index in indices and gpu.node not in alive]

    def _is_placed(self) -> bool:
        """Whether Ray has a living node for every bundle."""
        table = placement_group_table(self.group)
        return table["state"] == "CREATED" and set(table["bundles_to_node_id"].values()) <= _living_nodes()

    def _move(self, lost: Sequence[int]) -> list[GpuBundle]:
        """Gives the indices `lost` the GPUs that their bundles have now.

        Each keeps its bundle, on which its actors may be already: the driver and the rollout manager find the same
        without agreeing on it.
        """
        with self._moving:
            lost = self.lost(lost)  # another thread may have moved them
            bundles = {index: self.gpus[index].bundle for index in lost}
            try:
                found = {gpu.bundle: gpu for gpu in self._locate(list(bundles.values()), PROBE_TIMEOUT_S)}
            except RayError as error:
                why = str(error).split("\n", 1)[0]
                raise InsufficientGpusError(f"the GPUs in the place of the lost ones were not found: {why}") from error
            moved = {index: found[bundle] for index, bundle in bundles.items()}
            for node in {self.gpus[index].node for index in lost}:
                taken = {gpu.node: gpu.node_ip for index, gpu in moved.items() if self.gpus[index].node == node}
                if len(taken) > 1:
                    raise InsufficientGpusError(
                        "the GPUs for those of one lost node are on several,"
                        f" {', '.join(sorted(taken.values()))}: add whole nodes"
                    )
            for index, gpu in moved.items():
                self.gpus[index] = gpu
        return list(moved.values())

    def release(self) -> None:
        """Returns the GPUs to Ray."""
        remove_placement_group(self.group)


class ExtraBundles:
    """GPUs of one node that the run may get in addition, in a placement group of their own; in GPU order from `first`.

    Asking for them waits for nothing: `wait` tells when Ray has reserved them.
    """

    def __init__(self, first: int, count: int) -> None:
        self.gpus: dict[int, GpuBundle] = {}  # by index, after `locate`
        self._first = first
        self._group: PlacementGroup = placement_group([{"GPU": 1}] * count, strategy="STRICT_PACK")

    def wait(self, seconds: float) -> bool:
        """Waits so long at most; whether the GPUs are reserved."""
        return self._group.wait(seconds)

    async def locate(self) -> str:
        """Finds the GPUs and returns the id of their node. Raises a RayError if the node is lost."""
        locations = await asyncio.gather(*_locations(self._group, range(self._group.bundle_count)))
        found = in_order(GpuBundle(bundle, *location) for bundle, location in enumerate(locations))
        self.gpus = dict(enumerate(found, start=self._first))
        return found[0].node

    def options(self, index: int, share: float) -> dict[str, object]:
        """As `ReservedGpus.options`."""
        return _options(self._group, self.gpus[index].bundle, share)

    def follow(self) -> list[GpuBundle]:
        """None: others are asked for in the place of lost ones."""
        return []

    def lost(self, indices: Collection[int]) -> list[int]:
        """None, as of `follow`."""
        return []

    def release(self) -> None:
        """Returns the GPUs to Ray, or stops asking for them."""
        remove_placement_group(self._group)
