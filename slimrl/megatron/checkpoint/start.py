"""Loads the weights and the state that a run starts with, into the stages of one training rank; collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core.models.gpt import GPTModel

from slimrl.arguments import Arguments
from slimrl.arguments.checkpoints import is_hf_model
from slimrl.arguments.flags.checkpoint import CheckpointArguments
from slimrl.megatron.checkpoint import state
from slimrl.megatron.checkpoint.state import (
    CheckpointFolder,
    TrainingState,
    has_value_head,
    load_initial_weights,
    load_value_weights,
)
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.ref_model import PrecomputeConfig, PrecomputedReference
from slimrl.models.adapters import AdapterConfig
from slimrl.models.families import ModelMapping, family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.adapters import initialize_adapters, load_adapters
from slimrl.weights.hf_checkpoint import read_hf_config
from slimrl.weights.update.export import iter_hf_tensors


@dataclasses.dataclass(frozen=True)
class AdapterStart:
    """The first values of adapters: those of a PEFT folder, else fresh ones by `seed`."""

    config: AdapterConfig
    folder: Path | None
    seed: int

    @classmethod
    def from_args(cls, args: Arguments) -> AdapterStart | None:
        """None without --lora-rank."""
        config = AdapterConfig.from_args(args)
        folder = None if args.lora_load is None else Path(args.lora_load)
        return None if config is None else cls(config, folder, args.seed)


@dataclasses.dataclass(frozen=True)
class PolicyStart:
    """The start of the policy, or of the reward model that is trained in its place, by the flags of checkpoints."""

    folders: CheckpointArguments
    spec: ModelSpec
    stages: Sequence[GPTModel]
    parallel: ParallelState
    is_reward_model: bool = False  # the stages have a value head
    precompute: PrecomputeConfig | None = None
    adapters: AdapterStart | None = None  # of LoRA; --ref-load has the base then, --load only adapters

    def load_reference(self) -> None:
        """Loads the weights of --ref-load. Raises FileNotFoundError without that flag."""
        folders = self.folders
        if folders.ref_load is None:
            raise FileNotFoundError(
                f"--load {folders.load} contains no checkpoint and --ref-load is not given: convert the model with"
                " tools/convert_hf_to_torch_dist.py and give its folder as --ref-load"
            )
        self._load_initial(Path(folders.ref_load), folders.ref_ckpt_step)

    def precomputed_reference(self) -> PrecomputedReference | None:
        """The folder of `precompute`; None without it. Collective over all ranks.

        Call it while the stages have the weights of `load_reference`. Raises CheckpointError if the folder is of
        another reference or cannot be written.
        """
        if self.precompute is None:
            return None
        family = family_for(read_hf_config(Path(self.folders.hf_checkpoint)))
        return PrecomputedReference.open(self.precompute, self._weights_digest(family), self.parallel)

    def _weights_digest(self, family: ModelMapping) -> str:
        """A checksum of the values of all weights, whatever their layout, files and format; collective.

        Every rank gathers all weights, as for a weight update, and hashes a part of them.
        """
        ranks, own = self.parallel, {}
        tensors = iter_hf_tensors(
            self.stages,
            self.spec,
            family,
            ranks.tp_group,
            pp_group=ranks.pp_group,
            ep_group=ranks.ep_group,
            etp_group=ranks.etp_group,
        )
        for number, (name, tensor) in enumerate(tensors):
            if number % ranks.world_size == ranks.rank:
                content = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().data
                own[name] = f"{tensor.dtype} {list(tensor.shape)} {xxhash.xxh3_128_hexdigest(content)}"
        of_ranks: list[dict[str, str]] = [{} for _ in range(ranks.world_size)]
        dist.all_gather_object(of_ranks, own)
        lines = sorted(f"{name} {found}" for part in of_ranks for name, found in part.items())
        return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())

    def load_weights(self, *, has_reference: bool) -> CheckpointFolder | None:
        """Loads the policy's weights; returns the checkpoint to resume from, None for a new run.

        `has_reference`: the stages have the weights of --ref-load.
        """
        load = self.folders.load
        if self.adapters is not None:
            return self._load_adapted(self.adapters, has_reference=has_reference)
        if load is not None and is_hf_model(Path(load)):
            self._load_initial(Path(load), None)
            return None
        found = state.find_checkpoint(load, self.folders.ckpt_step)
        if found is None:
            if not has_reference:
                self.load_reference()
            return None
        resumes = not self.folders.finetune and found.iteration is not None
        if self.is_reward_model:
            if resumes and not has_value_head(found.path):
                raise ValueError(
                    f"--load {load} is the checkpoint of a policy, which has no reward head to continue with: give it"
                    " as --ref-load, or add --finetune, which starts a reward model from its weights"
                )
            load_value_weights(self.spec, self.stages, self.parallel, found.path)
        else:
            state.load_stages(self.stages, found.path)
        return found if resumes else None

    def _load_adapted(self, start: AdapterStart, *, has_reference: bool) -> CheckpointFolder | None:
        """The base is that of --ref-load; --load has the adapters of a run that is continued."""
        if not has_reference:
            self.load_reference()
        ranks = {"tp_rank": self.parallel.tp_rank, "tp_size": self.parallel.tp_size}
        initialize_adapters(self.stages, start.seed, **ranks)
        found = state.find_checkpoint(self.folders.load, self.folders.ckpt_step)
        if found is not None:
            state.load_stage_adapters(self.stages, found.path)
        elif start.folder is not None:
            family = family_for(read_hf_config(Path(self.folders.hf_checkpoint)))
            load_adapters(self.stages, self.spec, family, start.config, start.folder, **ranks)
        resumes = found is not None and not self.folders.finetune and found.iteration is not None
        return found if resumes else None

    def _load_initial(self, folder: Path, step: int | None) -> None:
        if not self.is_reward_model:
            load_initial_weights(self.spec, self.stages, self.parallel, folder, step)
            return
        place = folder if is_hf_model(folder) else state.find_checkpoint(str(folder), step)
        if place is None:
            raise FileNotFoundError(f"{folder} contains no checkpoint")
        load_value_weights(self.spec, self.stages, self.parallel, place if isinstance(place, Path) else place.path)

    def resume(
        self, training: TrainingState, found: CheckpointFolder | None, *, with_optimizer: bool
    ) -> tuple[int, dict[str, Any] | None]:
        """Restores optimizer, schedule and random state from `found`; returns the next rollout and the data state."""
        if found is None:
            return 0, None
        data_state = state.load_training_state(
            training,
            found,
            load_optimizer=with_optimizer and not self.folders.no_load_optim,
            load_random_state=not self.folders.no_load_rng,
        )
        assert found.iteration is not None  # checked by `load_weights`
        return found.iteration + 1, data_state
