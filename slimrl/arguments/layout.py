"""The layout of a run: GPUs on nodes, parallel groups of ranks, layers of pipeline stages.

Pure arithmetic, in the same order as the run: GPUs are counted node by node, training takes the first ones; ranks are
grouped in megatron-core's default order tp-cp-ep-dp-pp.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from slimrl.arguments.engine_groups import frozen_places, policy_places
from slimrl.arguments.hf_config import reward_gpus
from slimrl.arguments.namespace import Arguments


@dataclasses.dataclass(frozen=True)
class Place:
    """One GPU: its node and its number on that node, both from 0."""

    node: int
    gpu: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """GPUs in order; the others are positions in `places` (of `engines` and `reward` one range per server).

    `train` are the policy's GPUs, `critic` those that the critic has for itself.
    """

    places: tuple[Place, ...]
    train: range
    engines: tuple[range, ...]
    reward: tuple[range, ...] = ()
    critic: range = range(0)
    frozen: tuple[range, ...] = ()
    rollout: range = range(0)

    @property
    def total(self) -> int:
        """The number of GPUs that the run reserves."""
        return max(
            self.train.stop,
            self.critic.stop,
            self.rollout.stop,
            *(servers[-1].stop for servers in (self.engines, self.reward) if servers),
            0,
        )

    def shares(self, positions: Sequence[int]) -> dict[int, int]:
        """The number of these GPUs by node."""
        return dict(Counter(self.places[position].node for position in positions))

    def nodes_of(self, positions: Sequence[int]) -> list[int]:
        """The nodes of these GPUs."""
        return sorted({self.places[position].node for position in positions})

    def on_node(self, node: int) -> int:
        """The number of GPUs of the run on one node."""
        return sum(place.node == node for place in self.places)


def placement(args: Arguments, nodes: Sequence[int] | None) -> Placement:
    """GPUs of all roles. `nodes` has the GPUs of each node of a running cluster; None: --num-gpus-per-node each.

    GPUs beyond those of `nodes` are placed on a nonexistent node: the caller then rejects the plan.
    """
    train = 0 if args.debug_rollout_only else args.actor_num_gpus
    rollout = 0 if args.debug_train_only else args.rollout_gpus
    critic = range(train, train + args.critic_num_gpus)
    start = 0 if args.colocate else critic.stop
    engines = tuple(place.gpus for place in policy_places(args, start))
    frozen = tuple(place.gpus for place in frozen_places(args, start))
    others = max(critic.stop, start + rollout)
    reward = reward_gpus(args, others)
    total = max(others, *(servers.stop for servers in reward), 0)
    places = tuple(_places(total, nodes, args.num_gpus_per_node))
    return Placement(places, range(train), engines, reward, critic, frozen, range(start, start + rollout))


def _places(total: int, nodes: Sequence[int] | None, per_node: int) -> list[Place]:
    if nodes is None:
        return [Place(*divmod(position, per_node)) for position in range(total)]
    real = [Place(node, gpu) for node, gpus in enumerate(nodes) for gpu in range(gpus)]
    missing = [Place(len(nodes), gpu) for gpu in range(total - len(real))]
    return [*real, *missing][:total]


@dataclasses.dataclass(frozen=True)
class Groups:
    """Parallel sizes of the training world. `data` is the number of copies of the model that see different samples."""

    world: int
    tensor: int
    context: int
    pipeline: int
    data: int
    expert: int
    expert_tensor: int
    expert_data: int

    @property
    def optimizer_shares(self) -> int:
        """GPUs with the same dense weights, over which the distributed optimizer shards its state."""
        return self.data * self.context


def critic_layout(args: Arguments) -> Arguments:
    """The flags as they apply to a critic on GPUs of its own: their number takes the place of the policy's.

    The data-parallel size may differ from the policy's; all other parallel sizes are equal.
    """
    nodes, per_node = args.critic_num_nodes, args.critic_num_gpus_per_node
    assert nodes is not None and per_node is not None  # it has some
    size = critic_groups(args).data
    return dataclasses.replace(args, actor_num_nodes=nodes, actor_num_gpus_per_node=per_node, data_parallel_size=size)


def data_parallel_sizes(args: Arguments) -> tuple[int, ...]:
    """Of each group of training ranks: the policy's, then the critic's if it has GPUs of its own."""
    critic = (critic_groups(args).data,) if args.critic_num_gpus else ()
    return (1 if args.debug_rollout_only else args.data_parallel_size, *critic)


def groups_of(args: Arguments) -> Groups:
    """The sizes of the policy's ranks, from checked flags."""
    return _groups(args, args.actor_num_gpus)


def critic_groups(args: Arguments) -> Groups:
    """The sizes of the ranks of a critic on GPUs of its own."""
    return _groups(args, args.critic_num_gpus)


def _groups(args: Arguments, world: int) -> Groups:
    tp, cp, pp = args.tensor_model_parallel_size, args.context_parallel_size, args.pipeline_model_parallel_size
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size or 1
    return Groups(
        world=world,
        tensor=tp,
        context=cp,
        pipeline=pp,
        data=max(world // (tp * cp * pp), 1),
        expert=ep,
        expert_tensor=etp,
        expert_data=max(world // (etp * ep * pp), 1),
    )


def rank_lists(sizes: Sequence[tuple[str, int]], axis: str) -> list[list[int]]:
    """The groups of ranks along `axis`, where `sizes` names the axes from the fastest to the slowest.

    For (("tp", 2), ("dp", 2)) the groups of "dp" are [0, 2] and [1, 3].
    """
    stride, length, world = 1, 1, 1
    for name, size in sizes:
        if name == axis:
            stride, length = world, size
        world *= size
    starts = [rank for rank in range(world) if rank // stride % length == 0]
    return [[start + stride * step for step in range(length)] for start in starts]


def dense_axes(groups: Groups) -> tuple[tuple[str, int], ...]:
    """Axes of everything but experts, from the fastest to the slowest."""
    return (("TP", groups.tensor), ("CP", groups.context), ("DP", groups.data), ("PP", groups.pipeline))


def expert_axes(groups: Groups) -> tuple[tuple[str, int], ...]:
    """Axes of the experts, which use the same ranks in another division."""
    return (
        ("expert TP", groups.expert_tensor),
        ("EP", groups.expert),
        ("expert DP", groups.expert_data),
        ("PP", groups.pipeline),
    )


def stage_layers(args: Arguments) -> list[tuple[int, ...]]:
    """The layers that the GPUs of each pipeline stage hold, from checked flags.

    The first and the last stage may be given, the others get equal parts; where the embedding (the loss) counts as a
    layer, the first (last) piece has one less. With virtual stages the model goes round the GPUs several times.
    """
    stages, rounds = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    ends = {0: args.decoder_first_pipeline_num_layers, stages - 1: args.decoder_last_pipeline_num_layers}
    given = {stage: number for stage, number in ends.items() if number is not None}
    embedding, loss = args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split
    if stages == 1:
        return [tuple(range(args.num_layers))]
    rest = args.num_layers + embedding + loss - sum(given.values())
    share = rest // max(stages - len(given), 1)
    layers: list[tuple[int, ...]] = [()] * stages
    start = 0
    for turn in range(rounds):
        for stage in range(stages):
            count = given.get(stage, share) // rounds
            count -= embedding if (turn, stage) == (0, 0) else 0
            count -= loss if (turn, stage) == (rounds - 1, stages - 1) else 0
            layers[stage] += tuple(range(start, start + count))
            start += count
    return layers
