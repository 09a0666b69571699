"""Routing replay: routers choose the experts of a token as another pass over it, or the engine that sampled it, did.

Old log-probabilities and gradients are those of one function only if every pass sends a token to the same experts. A
router whose scores differ in the last digits, or after an optimizer step, may choose others (R3, arXiv:2510.11370).
Only the choice is replayed: the weights of the chosen experts are the router's own, with their gradient.

A micro-batch carries its choices in `PackedSequences.routing`. A hook of each layer hands them to the layer's router,
also when the layer's activations are recomputed. megatron-core's own replay keeps its routers in a list of the process,
and needs a choice for every token; here a token without one (padding, a tool's last tokens) takes the router's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from slimrl.arguments.namespace import MegatronArguments
from slimrl.data.routed_experts import UNKNOWN
from slimrl.megatron.parallel import ParallelState

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclasses.dataclass
class Routing:
    """The choices for the tokens of a micro-batch in the layers of this rank.

    `chosen` [tokens in a layer of this rank, experts per token] by layer, counted from 0: integers, `UNKNOWN` where the
    router decides. With `of_pass` it is empty until a pass within `recording` has filled it in.
    """

    chosen: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    of_pass: bool = False
    is_recording: bool = False


@contextlib.contextmanager
def recording(routings: Iterable[Routing | None]) -> Iterator[None]:
    """A forward pass whose choices are recorded in those that are `of_pass`."""
    recorded = [routing for routing in routings if routing is not None and routing.of_pass]
    for routing in recorded:
        routing.is_recording = True
    yield
    for routing in recorded:
        routing.is_recording = False


@dataclasses.dataclass(frozen=True)
class RoutingPlace:
    """How a rank holds the tokens of a micro-batch in its layers: as part `index` of `parts`, by sequence parallelism.

    `from_engines`: the batch has the engines' choices. Otherwise a pass records the router's.
    """

    index: int
    parts: int
    from_engines: bool
    device: torch.device

    @classmethod
    def of_rank(cls, flags: MegatronArguments, parallel: ParallelState) -> RoutingPlace | None:
        """None without routing replay."""
        if not flags.replays_routing:
            return None
        split = flags.sequence_parallel
        place = (parallel.tp_rank, parallel.tp_size) if split else (0, 1)
        return cls(*place, flags.use_rollout_routing_replay, parallel.device)

    def of_pack(self, routes: Tensor | None, rows: Tensor, local: Tensor, size: int) -> Routing:
        """The choices for a pack of `size` tokens, of which this context-parallel rank has `local`.

        `routes` int16 [tokens of the samples, layers, experts per token] belong to the `rows` of the pack.
        """
        if not self.from_engines:
            return Routing(of_pass=True)
        if routes is None:  # samples that no engine sampled
            return Routing()
        packed = routes.new_full((size, *routes.shape[1:]), UNKNOWN)
        packed[rows] = routes
        own = packed[local].chunk(self.parts)[self.index].transpose(0, 1).contiguous().to(self.device)
        return Routing(dict(enumerate(own)))


class RouterReplay:
    """Takes megatron-core's place for it in one router: the choices of the current micro-batch in its layer."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self.routing: Routing | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        """The scores and numbers [tokens, topk] of the experts to take; `scores` are [tokens, experts]."""
        values, chosen = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.routing is None:
            return values, chosen
        if self.routing.is_recording:
            self.routing.chosen[self._layer] = chosen.to(torch.int16)
            return values, chosen
        replayed = self.routing.chosen.get(self._layer)
        if replayed is None:
            return values, chosen
        chosen = torch.where(replayed == UNKNOWN, chosen, replayed.to(chosen.dtype))
        return scores.gather(1, chosen), chosen


def replay_routing(stages: Iterable[torch.nn.Module]) -> None:
    """Makes the routers of all layers follow the `Routing` of the micro-batch."""
    for layer, router in _routers(stages):
        replay = RouterReplay(layer.layer_number - 1)
        router.router_replay = replay
        layer.register_forward_pre_hook(_handing_to(replay), with_kwargs=True)


def _routers(stages: Iterable[torch.nn.Module]) -> Iterator[tuple[TransformerLayer, TopKRouter]]:
    for stage in stages:
        for layer in stage.modules():
            router = getattr(getattr(layer, "mlp", None), "router", None)
            if isinstance(layer, TransformerLayer) and isinstance(router, TopKRouter):
                yield layer, router


def _handing_to(replay: RouterReplay) -> Callable[..., None]:
    def before_layer(layer: torch.nn.Module, inputs: tuple[Any, ...], settings: dict[str, Any]) -> None:
        replay.routing = getattr(settings.get("packed_seq_params"), "routing", None)

    return before_layer
