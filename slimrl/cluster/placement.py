"""GPUs: a placement group with one bundle per GPU (or logical GPU), in a stable order over the nodes.

The order is node by node, on each by GPU number. Engines take neighbouring GPUs: an engine is on one node, or on
whole nodes, with the same number of GPUs on each. Called by the driver, which places everything by it.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slimrl.arguments import Arguments
from slimrl.arguments.engines import reward_gpus
from slimrl.cluster.ray_session import InsufficientGpusError

# Fractions of one GPU: a train worker and an engine may share it (colocated), two of a kind may not.
TRAIN_SHARE = 0.6
ENGINE_SHARE = 0.4
PLACEMENT_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True)
class PlacementPlan:
    """How many GPUs are reserved, and which of them serve training, rollout and the reward model (in GPU order).

    Each engine takes `per_engine` of the rollout GPUs, one after another; those of the reward model likewise.
    """

    total: int
    train: range
    rollout: range
    per_engine: int
    reward: range = range(0)
    per_reward_engine: int = 1


def plan_gpus(args: Arguments) -> PlacementPlan:
    """Colocated: both from GPU 0. Split: training first, rollout behind it. The reward model comes last."""
    train = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    rollout = 0 if args.debug_train_only else args.rollout_gpus
    per_engine = args.rollout_num_gpus_per_engine
    first = 0 if args.colocate else train
    others = max(train, first + rollout)
    total = others + reward_gpus(args)
    return PlacementPlan(
        total,
        range(train),
        range(first, first + rollout),
        per_engine,
        range(others, total),
        args.rm_num_gpus_per_engine,
    )


@dataclasses.dataclass(frozen=True)
class GpuBundle:
    """One reserved GPU (or CPU share): its bundle, its node and its GPU's number on that node.

    Where the node's CUDA_VISIBLE_DEVICES names GPUs by UUID, `gpu_id` is the UUID. `node` is Ray's own name of the
    node: one machine may have several.
    """

    bundle: int
    node: str
    node_ip: str
    gpu_id: int | str


def in_order(gpus: Iterable[GpuBundle]) -> list[GpuBundle]:
    """The GPUs node by node (by address), on each by GPU number."""

    def place(gpu: GpuBundle) -> tuple[int, str, bool, int | str]:
        return int(ipaddress.ip_address(gpu.node_ip)), gpu.node, isinstance(gpu.gpu_id, str), gpu.gpu_id

    return sorted(gpus, key=place)


@dataclasses.dataclass(frozen=True)
class EnginePart:
    """The GPUs of one engine on one node (indices in GPU order), in the order of the engine's ranks."""

    node: str
    gpus: tuple[int, ...]


def engine_parts(places: range, per_engine: int, gpus: Sequence[GpuBundle]) -> list[list[EnginePart]]:
    """For each engine on `places` its part on each of its nodes; `gpus` are all reserved ones, in order.

    Raises InsufficientGpusError where an engine is on several nodes and does not fill all of them alike.
    """
    on_node = Counter(gpu.node for gpu in gpus)
    engines: list[list[EnginePart]] = []
    for first in range(places.start, places.stop, per_engine):
        by_node: dict[str, list[int]] = {}
        for index in range(first, first + per_engine):
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
        f"engine {index} would get {shares}: an engine is on one node or fills whole nodes alike; free the nodes that"
        " other jobs use, or choose training GPUs and --rollout-num-gpus-per-engine so that engines end where nodes do"
    )


@ray.remote(num_cpus=0, num_gpus=TRAIN_SHARE)
class _Probe:
    def where(self) -> tuple[str, str, int | str]:
        gpu = str(ray.get_gpu_ids()[0])
        number = int(gpu) if gpu.isdigit() else gpu
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), number


def gpus_of_nodes() -> dict[str, int]:
    """By node, how many GPUs Ray has there, reserved or not."""
    return {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]}


class GpuBundles:
    """The reserved GPUs, in order, so that neighbours share a node.

    `engines` are the GPUs of each engine by node, `reward_engines` those of the reward model's servers.
    """

    def __init__(self, plan: PlacementPlan) -> None:
        """Reserves `plan.total` GPUs.

        Raises TimeoutError when Ray cannot place them, InsufficientGpusError when they cannot hold the engines.
        """
        self.plan = plan
        self.group: PlacementGroup = placement_group([{"GPU": 1}] * plan.total, strategy="PACK")
        if not self.group.wait(PLACEMENT_TIMEOUT_S):
            remove_placement_group(self.group)
            raise TimeoutError(
                f"Ray did not free {plan.total} GPUs within {PLACEMENT_TIMEOUT_S:.0f} s: another job holds them;"
                " see `ray status`"
            )
        self.gpus = self._probe()
        try:
            self.engines = engine_parts(plan.rollout, plan.per_engine, self.gpus)
            self.reward_engines = engine_parts(plan.reward, plan.per_reward_engine, self.gpus)
        except InsufficientGpusError:
            self.release()
            raise

    def _probe(self) -> list[GpuBundle]:
        actor: Any = _Probe
        probes = [actor.options(scheduling_strategy=self._strategy(i)).remote() for i in range(self.plan.total)]
        places = ray.get([probe.where.remote() for probe in probes])
        for probe in probes:
            ray.kill(probe)
        return in_order(GpuBundle(bundle, *place) for bundle, place in enumerate(places))

    def _strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)

    def options(self, index: int, share: float) -> dict[str, object]:
        """Ray options that place an actor on GPU `index`, taking `share` of it."""
        strategy = self._strategy(self.gpus[index].bundle)
        return {"num_cpus": 0, "num_gpus": share, "scheduling_strategy": strategy}

    def release(self) -> None:
        """Gives the GPUs back."""
        remove_placement_group(self.group)
