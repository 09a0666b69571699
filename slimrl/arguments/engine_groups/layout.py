"""The models and groups of a run, the GPUs of each engine, and the flags as they apply to the engines of one group.

Without --sglang-config a run has one model, the policy, with one group of all engines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimrl.arguments.engine_groups.config import (
    DECODE,
    FLAG,
    POLICY_NAMES,
    PREFILL,
    REGULAR,
    ServerGroup,
    ServerModel,
    read_server_models,
)
from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.parser import PassthroughTables


def resolve_server_models(args: Arguments, passthrough: PassthroughTables) -> list[Problem]:
    """Set `args.server_models` from --sglang-config or --prefill-num-servers; returns the problems of the file."""
    size = args.rollout_num_gpus_per_engine
    if args.sglang_config is not None:
        args.server_models, problems = read_server_models(
            args.sglang_config, hf_checkpoint=args.hf_checkpoint, per_engine=size, passthrough=passthrough
        )
        return problems
    if args.prefill_num_servers and args.rollout_num_gpus:
        prefill = args.prefill_num_servers * size
        groups = (ServerGroup(PREFILL, prefill, size), ServerGroup(DECODE, args.rollout_num_gpus - prefill, size))
        if prefill < args.rollout_num_gpus:  # else a rule says so
            args.server_models = (ServerModel(POLICY_NAMES[0], None, True, groups),)
    return []


PREFILL_FLAG = "--prefill-num-servers"


def flag_of_groups(args: Arguments) -> tuple[str, str]:
    """The flag that makes the groups, and its value."""
    if args.sglang_config is not None:
        return FLAG, args.sglang_config
    return PREFILL_FLAG, str(args.prefill_num_servers)


def served_by_engines(args: Arguments) -> tuple[ServerModel, ...]:
    """The models of the run's engines, the policy's among them; none without engines that the run starts."""
    if args.debug_train_only or not args.rollout_gpus:
        return ()
    group = ServerGroup(REGULAR, args.rollout_gpus, args.rollout_num_gpus_per_engine)
    return args.server_models or (ServerModel(POLICY_NAMES[0], None, True, (group,)),)


def policy_options(args: Arguments, name: str) -> list[Any]:
    """The option `name` of SGLang's server in each group of the policy that has it."""
    if not args.server_models:
        return [args.sglang_options[name]] if name in args.sglang_options else []
    own = [{**args.sglang_options, **group.overrides} for group in policy_groups(args)]
    return [options[name] for options in own if name in options]


def policy_groups(args: Arguments) -> list[ServerGroup]:
    """The groups that get the weight updates, without placeholders."""
    return [
        group for model in served_by_engines(args) if model.update_weights for group in model.groups if group.servers
    ]


TRANSFER_OPTION, DEFAULT_TRANSFER = "disaggregation_transfer_backend", "mooncake"


def kv_transfers(args: Arguments) -> list[str]:
    """What moves KV caches from prefill to decode servers, by SGLang's names; empty without such servers."""
    given = [
        {**args.sglang_options, **group.overrides}
        for model in served_by_engines(args)
        if model.disaggregated
        for group in model.groups
        if group.servers
    ]
    return sorted({str(options.get(TRANSFER_OPTION, DEFAULT_TRANSFER)) for options in given})


@dataclasses.dataclass(frozen=True)
class EnginePlace:
    """One engine: its model, the number of its group there, and its GPUs."""

    model: ServerModel
    group_index: int
    gpus: range

    @property
    def group(self) -> ServerGroup:
        """Its group."""
        return self.model.groups[self.group_index]


def engine_places(args: Arguments, first: int) -> list[EnginePlace]:
    """Every engine, in the order of the file; the first GPU is number `first`."""
    return list(_places(args, first))


def policy_places(args: Arguments, first: int) -> list[EnginePlace]:
    """The engines that get the weight updates."""
    return [place for place in engine_places(args, first) if place.model.update_weights]


def frozen_places(args: Arguments, first: int) -> list[EnginePlace]:
    """The engines of the frozen models."""
    return [place for place in engine_places(args, first) if not place.model.update_weights]


def _places(args: Arguments, first: int) -> Iterator[EnginePlace]:
    for model in served_by_engines(args):
        for number, group in enumerate(model.groups):
            size = group.num_gpus_per_engine
            for index in range(group.servers):
                yield EnginePlace(model, number, range(first + index * size, first + (index + 1) * size))
            first += group.num_gpus


def group_flags(args: Arguments, model: ServerModel, group: ServerGroup) -> Arguments:
    """The flags as they apply to the engines of one group: model, GPUs, size, and SGLang's options."""
    if not args.server_models:
        return args
    return dataclasses.replace(
        args,
        server_models=(),
        sglang_config=None,
        prefill_num_servers=None,
        hf_checkpoint=args.hf_checkpoint if model.model_path is None else str(Path(model.model_path)),
        rollout_num_gpus=group.num_gpus,
        rollout_num_gpus_per_engine=group.num_gpus_per_engine,
        sglang_options={**args.sglang_options, **group.overrides},
    )
