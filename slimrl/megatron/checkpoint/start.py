"""Loads the weights and the state that a run starts with, into the stages of one training rank; collective.

`load_initial_weights` fills the stages from a torch_dist checkpoint or a Hugging Face folder, for a new run and for the
reference. Both give the same weights in every layout. The converters load the model only.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from megatron.core.models.gpt import GPTModel

from slimrl.arguments import Arguments
from slimrl.arguments.checkpoints import Found, is_hf_model, iteration_of, updated_reference
from slimrl.arguments.flags.checkpoint import CheckpointArguments
from slimrl.megatron.checkpoint import folder as checkpoint_folder
from slimrl.megatron.checkpoint import io, state
from slimrl.megatron.checkpoint.folder import CheckpointFolder, find_checkpoint
from slimrl.megatron.checkpoint.state import TrainingState, sharded_weights
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.ref_model import PrecomputeConfig, PrecomputedReference
from slimrl.models.adapters import AdapterConfig, is_adapter
from slimrl.models.families import ModelMapping, family_for
from slimrl.models.families.param_mapping import OUTPUT_LAYER, VALUE_HEAD
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.adapters import initialize_adapters, load_adapters
from slimrl.weights.checkpoint_checksums import CheckedFolder
from slimrl.weights.convert.hf_to_megatron import load_hf_checkpoint
from slimrl.weights.hf_checkpoint import read_hf_config
from slimrl.weights.hf_checkpoint_writer import byte_array
from slimrl.weights.safe_pickle import check_extra_state
from slimrl.weights.update.export import iter_hf_tensors

_logger = logging.getLogger(__name__)


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
    updated_reference: Path | None = None  # the checkpoint after the last update by --ref-update-interval

    @classmethod
    def from_args(
        cls, args: Arguments, spec: ModelSpec, stages: Sequence[GPTModel], parallel: ParallelState
    ) -> PolicyStart:
        """The start of the policy in `stages`."""
        precompute, adapters = PrecomputeConfig.from_args(args), AdapterStart.from_args(args)
        updated = updated_reference(args)
        return cls(args, spec, stages, parallel, args.trains_reward_model, precompute, adapters, updated)

    def load_reference(self, *, at_resume: bool = False) -> None:
        """Loads the weights of --ref-load; `at_resume` those of the last update, if --load continues after it.

        Raises FileNotFoundError without that flag, or without the checkpoint of the update.
        """
        folders = self.folders
        updated = self.updated_reference if at_resume else None
        if updated is not None:
            if not updated.is_dir():
                raise FileNotFoundError(
                    f"{updated.parent} has no checkpoint after rollout {iteration_of(updated.name)}, whose weights are"
                    " the reference (--ref-update-interval): copy it there"
                )
            if self.parallel.rank == 0:
                _logger.info("the reference model has the weights of %s", updated)
            load_stages(self.stages, updated)
            return
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
                content = byte_array(tensor.detach().contiguous().cpu()).data
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
        found = find_checkpoint(load, self.folders.ckpt_step)
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
            load_stages(self.stages, found.path)
        return found if resumes else None

    def _load_adapted(self, start: AdapterStart, *, has_reference: bool) -> CheckpointFolder | None:
        """The base is that of --ref-load; --load has the adapters of a run that is continued."""
        if not has_reference:
            self.load_reference()
        ranks = _places(self.parallel)
        initialize_adapters(self.stages, start.seed, **ranks)
        found = find_checkpoint(self.folders.load, self.folders.ckpt_step)
        if found is not None:
            load_stage_adapters(self.stages, found.path)
        elif start.folder is not None:
            family = family_for(read_hf_config(Path(self.folders.hf_checkpoint)))
            load_adapters(self.stages, self.spec, family, start.config, start.folder, **ranks)
        resumes = found is not None and not self.folders.finetune and found.iteration is not None
        return found if resumes else None

    def _load_initial(self, folder: Path, step: int | None) -> None:
        if not self.is_reward_model:
            load_initial_weights(self.spec, self.stages, self.parallel, folder, step)
            return
        place = folder if is_hf_model(folder) else find_checkpoint(str(folder), step)
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


def _places(parallel: ParallelState) -> dict[str, int]:
    """Where this rank is in tensor and expert tensor parallelism."""
    return {
        "tp_rank": parallel.tp_rank,
        "tp_size": parallel.tp_size,
        "etp_rank": parallel.etp_rank,
        "etp_size": parallel.etp_size,
    }


def load_model_only(model: GPTModel, folder: Path, step: int | None = None) -> CheckpointFolder:
    """`load_stages` for a model without virtual pipeline stages."""
    return load_stages([model], folder, step)


def load_stages(stages: Sequence[GPTModel], folder: Path, step: int | None = None) -> CheckpointFolder:
    """Fill this rank's `stages` from the checkpoint in `folder` (a checkpoint's root or its own folder); collective.

    Ignores optimizer and other state there. Raises FileNotFoundError if there is no checkpoint, ValueError if its
    tensors are not those of this model.
    """
    found = find_checkpoint(folder, step)
    if found is None:
        raise FileNotFoundError(
            f"{folder} has no checkpoint ({checkpoint_folder.TRACKER_NAME} is missing): convert the model with"
            " tools/convert_hf_to_torch_dist.py or give another folder"
        )
    if CheckedFolder.open(found.path) is None and dist.get_rank() == 0:
        _logger.warning("%s has no checksums: its integrity was not verified", found.path)
    if any(map(is_adapter, io.stored_names(found.path))):
        raise ValueError(
            f"{found.path} has LoRA adapters alone: train with --lora-rank, or give the checkpoint of a whole model"
        )
    loaded = io.read({"model": sharded_weights(stages)}, found.path, model_only=True)
    for number, stage in enumerate(stages):
        _fill(stage, loaded["model"][str(number)], found.path)
    return found


def load_stage_adapters(stages: Sequence[GPTModel], folder: Path, flag: str = "--lora-rank") -> None:
    """Fill the adapters of this rank's `stages` from the checkpoint's own `folder`, and a critic's head; collective.

    `flag` made the adapters. Raises ValueError if the folder has no adapters, or others.
    """
    if not any(map(is_adapter, io.stored_names(folder))):
        base = "--ref-load" if flag == "--lora-rank" else "--critic-load"
        raise ValueError(
            f"{folder} has weights and no adapters, and {flag} continues a run with adapters: give it as {base}, which"
            f" makes it the base, or leave out {flag}"
        )
    loaded = io.read({"model": sharded_weights(stages, adapters=True)}, folder, model_only=True)
    for number, stage in enumerate(stages):
        _fill(stage, loaded["model"][str(number)], folder, adapters=True)


def _fill(stage: GPTModel, state: dict[str, Any], folder: Path, *, adapters: bool = False) -> None:
    """Strict loading, except that extra state may be absent on either side: it depends on the layer implementation.

    `state` has the adapters of the stage, or all else.
    """
    for name, value in state.items():
        if io.is_extra_state(name):
            check_extra_state(value, f"{folder}: {name}")
    missing, unexpected = stage.load_state_dict(state, strict=False)
    for names, what in ((missing, "has no values for"), (unexpected, "has values that the model does not have, for")):
        wrong = [name for name in names if not io.is_extra_state(name) and is_adapter(name) == adapters]
        if wrong:
            raise ValueError(f"{folder} {what} {', '.join(wrong[:5])} ({len(wrong)} in all): the model flags differ")


def load_value_weights(spec: ModelSpec, stages: Sequence[GPTModel], parallel: ParallelState, folder: Path) -> None:
    """Load the weights in `folder`, a critic's or a policy's, into `stages` with a value head; collective.

    A policy has no value head: the new one keeps its zeros. `folder` is a checkpoint's own, or a Hugging Face folder,
    also of a classifier with one output, such as a reward model.
    Raises as `load_initial_weights`.
    """
    if is_hf_model(folder):
        _load_hf(spec, stages, parallel, folder, value_head=True)
        return
    found = CheckpointFolder(folder, None)
    if has_value_head(folder):
        load_stages(stages, found.path)
        return
    wanted = sharded_weights(stages)
    for part in wanted.values():
        part.pop(VALUE_HEAD, None)
    loaded = io.read({"model": wanted}, folder, model_only=True, ignored=(OUTPUT_LAYER,))["model"]
    for number, stage in enumerate(stages):
        heads = {name: value for name, value in stage.state_dict().items() if name == VALUE_HEAD}
        _fill(stage, loaded[str(number)] | heads, folder)


def load_critic(
    spec: ModelSpec,
    stages: Sequence[GPTModel],
    parallel: ParallelState,
    start: Found,
    *,
    base: Found | None,
    resumed: bool,
    seed: int,
) -> None:
    """Load a critic from `start` (`critic_start`) into `stages`.

    With adapters beside the model `base`: those of `start` if it is `resumed`, else fresh ones by `seed`.
    """
    load_value_weights(spec, stages, parallel, start.folder if base is None else base.folder)
    if base is not None and resumed:
        load_stage_adapters(stages, start.folder, "--critic-lora-rank")
    elif base is not None:
        initialize_adapters(stages, seed, **_places(parallel))


def has_value_head(folder: Path) -> bool:
    """Whether the checkpoint in `folder` is that of a critic or a reward model."""
    return VALUE_HEAD in io.stored_names(folder)


def load_initial_weights(
    spec: ModelSpec, stages: Sequence[GPTModel], parallel: ParallelState, folder: Path, step: int | None
) -> None:
    """Load the weights in `folder` (of iteration `step`, None for the newest) into the stages of this rank.

    Each rank reads only its part. Raises FileNotFoundError for an absent checkpoint and ValueError if its tensors are
    not those of the model.
    """
    if not is_hf_model(folder):
        load_stages(stages, folder, step)
        return
    _load_hf(spec, stages, parallel, folder)


def _load_hf(
    spec: ModelSpec, stages: Sequence[GPTModel], parallel: ParallelState, folder: Path, value_head: bool = False
) -> None:
    load_hf_checkpoint(
        stages,
        spec,
        family_for(read_hf_config(folder)),
        folder,
        tp_rank=parallel.tp_rank,
        tp_size=parallel.tp_size,
        etp_rank=parallel.etp_rank,
        etp_size=parallel.etp_size,
        value_head=value_head,
    )
