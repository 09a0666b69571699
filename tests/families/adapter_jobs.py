"""Run inside ranks by `test_adapters`: a toy model with the adapters of a PEFT folder, its logits and its exports."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.families import jobs


@dataclasses.dataclass
class AdaptedOutcome:
    """A rank's result: logits [sequences] of [tokens, vocabulary] with adapters and of the base; the exports."""

    logits: list[Tensor]
    base: list[Tensor]
    names: set[str]  # of the exported adapters
    different: list[str]  # exported adapters that are not those of the folder, bit for bit
    merged: dict[str, Tensor]  # the exported weights with the adapters added


def adapted(
    rank: int,
    world_size: int,
    init_method: str,
    cases: list[jobs.Case],
    adapters: dict[str, Path],
    sequences: list[list[int]],
) -> dict[str, AdaptedOutcome]:
    """By case name; all cases have the same parallel sizes."""
    from slimrl.megatron import parallel

    args = cases[0].args
    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    try:
        return {case.name: _one(case, state, adapters[case.name], sequences) for case in cases}
    finally:
        parallel.shutdown()


def _one(case: jobs.Case, state: Any, folder: Path, sequences: list[list[int]]) -> AdaptedOutcome:
    from slimrl.megatron.model import model_builder
    from slimrl.models.adapters import AdapterConfig, AdapterMapping
    from slimrl.models.families import family_for
    from slimrl.models.model_spec import ModelSpec
    from slimrl.weights.adapters import load_adapters, without_adapters
    from slimrl.weights.hf_checkpoint import read_hf_config
    from slimrl.weights.update.export import iter_hf_tensors

    built = model_builder.build_model(case.args, state).eval()
    family, spec = family_for(read_hf_config(case.folder)), ModelSpec.from_args(case.args)
    jobs.load(built, spec, family, state, case.folder)
    config = AdapterConfig.from_args(case.args)
    assert config is not None
    load_adapters(built, spec, family, config, folder, tp_rank=state.tp_rank, tp_size=state.tp_size)
    logits = jobs.packed_logits(built, state, case.args, sequences)
    with without_adapters(built):
        base = jobs.packed_logits(built, state, case.args, sequences)

    def exported(mapping: Any) -> dict[str, Tensor]:
        groups = {"pp_group": state.pp_group, "ep_group": state.ep_group, "etp_group": state.etp_group}
        return {name: one.clone() for name, one in iter_hf_tensors(built, spec, mapping, state.tp_group, **groups)}

    found, stored = exported(AdapterMapping.of(family, config)), load_file(folder / "adapter_model.safetensors")
    different = [name for name, tensor in found.items() if not torch.equal(tensor, stored[name])]
    return AdaptedOutcome(logits, base, set(found), different, exported(family))
