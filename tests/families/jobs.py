"""Run inside ranks by the family tests: build, load, compute logits, export. Each job handles many cases."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimrl.arguments import Arguments


@dataclasses.dataclass(frozen=True)
class Case:
    """One model in one layout; `args` describe both. Its weights are those of `checkpoint` (torch_dist) if given."""

    name: str
    args: Arguments
    folder: Path
    checkpoint: Path | None = None


@dataclasses.dataclass
class Outcome:
    """A rank's result: logits [sequences] of [tokens, vocabulary], and the names of all exported tensors in order.

    `different` are the exported tensors that are not bit-identical to the checkpoint.
    """

    logits: list[Tensor]
    names: list[str]
    different: list[str]


def logits_and_export(
    rank: int, world_size: int, init_method: str, cases: list[Case], sequences: list[list[int]]
) -> dict[str, Outcome]:
    """By case name: packed logits (for a single pipeline stage), and the weights exported as they were loaded.

    All cases must have the same parallel sizes: the groups are created once.
    """
    from slimrl.megatron import parallel

    args = cases[0].args
    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    try:
        return {case.name: _one(case, state, sequences) for case in cases}
    finally:
        parallel.shutdown()


def _one(case: Case, state: Any, sequences: list[list[int]]) -> Outcome:
    from slimrl.megatron.checkpoint import start
    from slimrl.megatron.model import model_builder
    from slimrl.models.families import family_for
    from slimrl.models.model_spec import ModelSpec
    from slimrl.weights.hf_checkpoint import read_hf_config

    built = model_builder.build_model(case.args, state).eval()
    family, shape = family_for(read_hf_config(case.folder)), ModelSpec.from_args(case.args)
    if case.checkpoint is None:
        load(built, shape, family, state, case.folder)
    else:
        start.load_model_only(built, case.checkpoint)
    logits = packed_logits(built, state, case.args, sequences) if sequences and state.pp_size == 1 else []
    names, different = _compare_export(built, shape, family, state, case.folder)
    return Outcome(logits, names, different)


def load(built: Any, shape: Any, family: Any, state: Any, folder: Path) -> None:
    from slimrl.weights.convert.hf_to_megatron import load_hf_checkpoint

    load_hf_checkpoint(
        built,
        shape,
        family,
        folder,
        tp_rank=state.tp_rank,
        tp_size=state.tp_size,
        etp_rank=state.etp_rank,
        etp_size=state.etp_size,
    )


def packed_logits(built: Any, state: Any, args: Arguments, sequences: list[list[int]]) -> list[Tensor]:
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [len(sequence) for sequence in sequences]
    tokens = [token for sequence in sequences for token in sequence]
    padding = -len(tokens) % 8
    bounds = torch.tensor([0, *lengths, *([padding] if padding else [])]).cumsum(0).to(torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    with torch.no_grad():
        positions = None if args.mrope_section is None else positions_of_text([*lengths, padding])
        local = built(torch.tensor([tokens + [0] * padding]), positions, None, packed_seq_params=params)
    shards = [torch.empty_like(local) for _ in range(state.tp_size)]
    torch.distributed.all_gather(shards, local, group=state.tp_group)
    logits = torch.cat(shards, dim=-1)[0, : len(tokens), : args.vocab_size]
    return list(logits.split(lengths))


def positions_of_text(lengths: list[int]) -> Tensor:
    """int64 [3, 1, tokens]: of text, which has the same position in time, height and width."""
    return torch.cat([torch.arange(length) for length in lengths]).expand(3, 1, -1)


def _compare_export(built: Any, shape: Any, family: Any, state: Any, folder: Path) -> tuple[list[str], list[str]]:
    from slimrl.weights.hf_checkpoint import HfCheckpoint
    from slimrl.weights.update.export import iter_hf_tensors

    names, different = [], []
    with HfCheckpoint(folder) as checkpoint:
        for name, tensor in iter_hf_tensors(
            built,
            shape,
            family,
            state.tp_group,
            pp_group=state.pp_group,
            ep_group=state.ep_group,
            etp_group=state.etp_group,
        ):
            names.append(name)
            if not torch.equal(tensor, checkpoint.tensor(name)):
                different.append(name)
    return names, different


def to_torch_dist(rank: int, world_size: int, init_method: str, cases: list[Case]) -> None:
    """Writes the `checkpoint` of each case from its folder, as the tool does."""
    from slimrl.megatron.checkpoint.state import model_blueprint
    from slimrl.models.families import family_for
    from slimrl.models.model_spec import ModelSpec
    from slimrl.weights.convert.hf_to_megatron import hf_to_torch_dist
    from slimrl.weights.hf_checkpoint import read_hf_config

    for case in cases:
        hf_to_torch_dist(
            case.folder,
            case.checkpoint,
            ModelSpec.from_args(case.args),
            family_for(read_hf_config(case.folder)),
            functools.partial(model_blueprint, case.args),
        )
