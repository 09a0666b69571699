"""Slots: a placement group with one bundle per GPU (or logical GPU), in a stable order over the nodes."""

from __future__ import annotations

import dataclasses
import ipaddress

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slimrl.arguments import Arguments

# Fractions of one slot: a train worker and an engine may share it (colocated), two of a kind may not.
TRAIN_SHARE = 0.6
ENGINE_SHARE = 0.4
PLACEMENT_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """How many slots are reserved, and which of them serve training and rollout (indices in slot order)."""

    total: int
    train: range
    rollout: range


def plan_slots(args: Arguments) -> SlotPlan:
    """Colocated: both from slot 0. Split: training first, rollout behind it."""
    train = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    rollout = 0 if args.debug_train_only else args.rollout_num_gpus or 0
    if args.colocate:
        return SlotPlan(max(train, rollout), range(train), range(rollout))
    return SlotPlan(train + rollout, range(train), range(train, train + rollout))


@dataclasses.dataclass(frozen=True)
class Slot:
    """One reserved GPU (or CPU share): its bundle, its node and its GPU number on that node."""

    bundle: int
    node_ip: str
    gpu_id: int


@ray.remote(num_cpus=0, num_gpus=TRAIN_SHARE)
class _Probe:
    def where(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), int(ray.get_gpu_ids()[0])


class Slots:
    """The reserved slots, sorted by node address and GPU number, so that neighbours share a node."""

    def __init__(self, plan: SlotPlan) -> None:
        """Reserves `plan.total` slots. Raises TimeoutError when Ray cannot place them."""
        self.plan = plan
        self.group: PlacementGroup = placement_group([{"GPU": 1}] * plan.total, strategy="PACK")
        if not self.group.wait(PLACEMENT_TIMEOUT_S):
            remove_placement_group(self.group)
            raise TimeoutError(
                f"Ray did not free {plan.total} GPU slots within {PLACEMENT_TIMEOUT_S:.0f} s: another job holds them;"
                " see `ray status`"
            )
        self.slots = self._probe()

    def _probe(self) -> list[Slot]:
        probes = [_Probe.options(scheduling_strategy=self._strategy(i)).remote() for i in range(self.plan.total)]
        places = ray.get([probe.where.remote() for probe in probes])
        for probe in probes:
            ray.kill(probe)
        slots = [Slot(bundle, ip, gpu) for bundle, (ip, gpu) in enumerate(places)]
        return sorted(slots, key=lambda slot: (int(ipaddress.ip_address(slot.node_ip)), slot.gpu_id))

    def _strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)

    def options(self, index: int, share: float) -> dict[str, object]:
        """Ray options that place an actor on slot `index`, taking `share` of it."""
        strategy = self._strategy(self.slots[index].bundle)
        return {"num_cpus": 0, "num_gpus": share, "scheduling_strategy": strategy}

    def release(self) -> None:
        """Gives the slots back."""
        remove_placement_group(self.group)
