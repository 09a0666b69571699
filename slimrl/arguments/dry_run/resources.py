"""What a plan needs of each node: GPUs, host memory and shared memory; for job files of cluster schedulers.

GPUs are exact. Memory is an estimate for the fullest node: what the plan keeps on the host, which is exact where
`StageMemory` is, and constants for the processes themselves. docs/dry-run.md has the formula.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from slimrl.arguments.dry_run.plan import Plan
from slimrl.arguments.memory import StageMemory
from slimrl.processes.process_info import GIB

# Resident memory of a process without tensors of the model: Python, torch, CUDA's context, staging buffers.
RANK_BYTES = 8 * GIB
SERVER_BYTES_PER_GPU = 8 * GIB
# Ray's processes, the driver and the rollout manager with its samples; on every node, since any can be the head.
NODE_BYTES = 24 * GIB
# NCCL's buffers between the processes of a node, and Ray's object store, through which the samples pass.
SHARED_BYTES_PER_GPU = 2 * GIB
SHARED_BYTES_PER_NODE = 16 * GIB


@dataclasses.dataclass(frozen=True)
class NodeResources:
    """`memory_bytes` is that of the fullest node and includes `shared_memory_bytes`, the size of /dev/shm."""

    nodes: int
    gpus_per_node: int
    memory_bytes: int
    shared_memory_bytes: int

    def write(self, path: Path) -> None:
        """Writes the fields as a JSON object."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> NodeResources:
        """What `write` has written."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def node_resources(plan: Plan) -> NodeResources:
    """The resources of the nodes of a plan; every node is given those of the fullest one."""
    where = plan.placement
    nodes = where.nodes_of(range(where.total))
    gpus = max((where.on_node(node) for node in nodes), default=0)
    shared = SHARED_BYTES_PER_NODE + gpus * SHARED_BYTES_PER_GPU
    trained = _rank_bytes(plan, where.train, plan.memory.stages)
    trained |= _rank_bytes(plan, where.critic, plan.memory.critic)
    kept = _frozen_weights(plan)
    on_nodes = []
    for node in nodes:
        ranks = sum(size for position, size in trained.items() if where.places[position].node == node)
        servers = sum(where.shares(gpus_of).get(node, 0) for gpus_of in (*where.engines, *where.frozen, *where.reward))
        frozen = sum(where.shares(gpus_of).get(node, 0) * size for gpus_of, size in kept)
        on_nodes.append(ranks + servers * SERVER_BYTES_PER_GPU + frozen)
    return NodeResources(len(nodes), gpus, NODE_BYTES + shared + max(on_nodes, default=0), shared)


def _frozen_weights(plan: Plan) -> list[tuple[range, int]]:
    """GPUs of each frozen model's server, and its weights on one of them: in host memory while training runs."""
    if not plan.args.offload_rollout:
        return []
    sizes = {(one.model, one.number): one.memory.weights for one in plan.group_memory if one.frozen and one.memory}
    places = ((server.gpus, server.place) for server in plan.servers)
    return [(gpus, sizes.get((place.model.name, place.group_index), 0)) for gpus, place in places]


def _rank_bytes(plan: Plan, positions: range, stages: Sequence[StageMemory]) -> dict[int, int]:
    """Host memory of each training rank at these positions; ranks of a pipeline stage follow each other."""
    if not stages:
        return {}
    of_stage = []
    for stage in stages:
        state = stage.weights + stage.optimizer + stage.critic
        # parked while engines generate; written behind
        copies = bool(plan.args.offload_train) + bool(plan.args.async_save)
        of_stage.append(RANK_BYTES + stage.host + copies * state)
    per_stage = len(positions) // len(stages)
    return {position: of_stage[rank // per_stage] for rank, position in enumerate(positions)}
