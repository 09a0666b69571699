"""The state of a training rank as checkpoint content: saved, restored, or initialised from other weights.

Any parallel layout can read a checkpoint, except the random number generators, which have one entry per rank and are
restored only in the same layout. The trainer saves and restores model, optimizer, schedule, random state and data
position (`checkpoint.saver` writes them); the converters use the model only.
`load_initial_weights` fills a rank's stages from a torch_dist checkpoint or a Hugging Face folder, for a new run and
for the reference. Both give the same weights in every layout.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slimrl.arguments.checkpoints import SIZES, is_hf_model
from slimrl.megatron import optimizer as adam_state
from slimrl.megatron.checkpoint import folder as checkpoint_folder
from slimrl.megatron.checkpoint import io
from slimrl.megatron.checkpoint.folder import CheckpointFolder, find_checkpoint
from slimrl.megatron.checkpoint.saver import Snapshot
from slimrl.megatron.model.output_layer import ValueModel
from slimrl.megatron.optimizer import after_load, step_counts, sync_step_count
from slimrl.megatron.parallel import ParallelState
from slimrl.models.adapters import is_adapter
from slimrl.models.families import family_for
from slimrl.models.families.param_mapping import OUTPUT_LAYER, VALUE_HEAD
from slimrl.models.model_spec import ModelSpec
from slimrl.platform.collective_errors import run_on_rank_zero
from slimrl.weights.adapters import adapted_layers
from slimrl.weights.checkpoint_checksums import CheckedFolder
from slimrl.weights.convert.hf_to_megatron import load_hf_checkpoint
from slimrl.weights.hf_checkpoint import read_hf_config
from slimrl.weights.safe_pickle import check_extra_state


def layout(parallel: ParallelState) -> list[int]:
    """The sizes along the axes; states can only go back to ranks of the same layout."""
    return [parallel.pp_size, parallel.tp_size, parallel.dp_size * parallel.cp_size]


def sharded(parallel: ParallelState) -> ShardedObject:
    """This rank's generators as its own shard of the entry `rng_state`."""
    place = (parallel.pp_rank, parallel.tp_rank, parallel.dp_cp_group.rank())
    return ShardedObject("rng_state", capture(), tuple(layout(parallel)), place)


def capture() -> dict[str, Any]:
    """The state of every generator of this process, as plain data and tensors."""
    drawn: Any = numpy.random.get_state()
    kind, keys, position, has_gauss, gauss = drawn
    state = {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Restore every generator to its state at `capture`."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


__all__ = [
    "CheckpointFolder",
    "TrainingState",
    "find_checkpoint",
    "load_model_only",
    "load_stages",
    "load_training_state",
    "save_model_only",
    "take_snapshot",
]

_logger = logging.getLogger(__name__)


@dataclasses.dataclass
class TrainingState:
    """The live objects that a checkpoint saves and restores."""

    stages: Sequence[GPTModel]  # this rank's model chunks
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    parallel: ParallelState
    trained_weights: str = "every weight trained"  # the flag that selected them, as typed
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)  # of the run, by name; restored in place
    divisions: dict[bool, io.Division] = dataclasses.field(  # of saves with and without the optimizer
        default_factory=lambda: {True: io.Division(), False: io.Division()}
    )


def _sharding(parallel: ParallelState) -> dict[str, Any]:
    """Sharding metadata of megatron-core; its default for the optimizer cannot be loaded in 0.16.1."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel.dp_cp_group,
    }


def take_snapshot(
    state: TrainingState,
    rollout_id: int,
    data_state: dict[str, Any] | None,
    *,
    with_optimizer: bool,
    saved_with: str | None = None,
) -> Snapshot:
    """The state that resumes after `rollout_id`, for `CheckpointSaver`; collective.

    `saved_with` is the same text in checkpoints that belong together: policy and critic.

    `data_state` (rank 0's is saved, others may pass None) must be plain data: numbers, strings, lists, tuples, dicts,
    tensors. The snapshot has the live weights and optimizer state, which must not change until they are copied or
    written. Raises ValueError for other data.
    """
    sharding = _sharding(state.parallel)
    model = _sharded(state.stages, sharding, adapters=_has_adapters(state.stages))
    content: ShardedStateDict = {"model": model, "iteration": rollout_id, "scheduler": state.scheduler.state_dict()}
    content["rng_state"] = sharded(state.parallel)
    if with_optimizer:
        content["optimizer"] = state.optimizer.sharded_state_dict(model, is_loading=False, metadata=sharding)
        sync_step_count(content["optimizer"], step_counts(state.optimizer))
    about = {
        "weight_version": str(rollout_id + 1),  # under which these weights are updated
        "has_optimizer": with_optimizer,
        "optimizer": state.optimizer.config.optimizer,
        "distributed_optimizer": state.optimizer.config.use_distributed_optimizer,
        "layout": layout(state.parallel),
        "trained_weights": state.trained_weights,
        "value_head": isinstance(state.stages[0], ValueModel),  # a critic or a reward model
        "sizes": {name: vars(state.stages[0].config)[name] for name in SIZES},
        **({} if not state.numbers else {"numbers": dict(state.numbers)}),
        **({} if saved_with is None else {"saved_with": saved_with}),
    }
    prepared = io.prepare(content, {"content": "training", **about}, state.divisions[with_optimizer])
    return Snapshot(
        iteration=rollout_id,
        prepared=prepared,
        # last, so that a rank that fails here leaves no other rank waiting in a collective
        data_state=b"" if data_state is None else checkpoint_folder.encode_data_state(data_state),
        about=about,
    )


def load_training_state(
    state: TrainingState, found: CheckpointFolder, *, load_optimizer: bool, load_random_state: bool
) -> dict[str, Any] | None:
    """Restore optimizer, schedule and random state (the model is already loaded); collective.

    Returns the data state, or None. Raises ValueError if the checkpoint has no optimizer state or one of the other
    kind.
    """
    metadata = io.read_training_metadata(found.path)
    wanted: ShardedStateDict = {}
    if load_optimizer:
        _check_optimizer(metadata, found, state)
        sharding = _sharding(state.parallel)
        model = _sharded(state.stages, sharding, adapters=_has_adapters(state.stages))
        wanted["optimizer"] = state.optimizer.sharded_state_dict(model, is_loading=True, metadata=sharding)
    same_layout = metadata.get("layout") == layout(state.parallel)
    if load_random_state and same_layout:
        wanted["rng_state"] = sharded(state.parallel)
    elif load_random_state:
        _logger.info("%s was saved in another parallel layout: its random state is not restored", found.path)
    loaded = io.read(wanted, found.path, model_only=False)
    if load_optimizer:
        adam_state.convert_step_format(loaded["optimizer"], state.optimizer)
        state.optimizer.load_state_dict(loaded["optimizer"])
        after_load(state.optimizer)
        state.scheduler.load_state_dict(loaded["scheduler"])
    if load_random_state and same_layout:
        restore(loaded["rng_state"])
    saved = metadata.get("numbers", {})
    state.numbers.update({name: saved[name] for name in state.numbers.keys() & saved.keys()})
    return checkpoint_folder.read_data_state(found.path)


def _has_adapters(stages: Sequence[GPTModel]) -> bool:
    """Whether checkpoints have the adapters alone; the same on all ranks, since every layer has one or none has."""
    return next(adapted_layers(stages), None) is not None


def _sharded(
    stages: Sequence[GPTModel], sharding: dict[str, Any] | None = None, *, adapters: bool = False
) -> ShardedStateDict:
    """The parameters of each stage under its number, of its adapters or of all else; the files have global names."""
    return {
        str(number): {
            name: entry
            for name, entry in stage.sharded_state_dict(metadata=sharding).items()
            if is_adapter(name) == adapters
        }
        for number, stage in enumerate(stages)
    }


def _check_optimizer(metadata: dict[str, Any], found: CheckpointFolder, state: TrainingState) -> None:
    if not metadata.get("has_optimizer", False):
        raise ValueError(
            f"{found.path} has no optimizer state: add --no-load-optim to start with a fresh one, or --finetune"
        )
    used, saved = state.optimizer.config.optimizer, metadata.get("optimizer", "adam")
    if saved != used:
        raise ValueError(
            f"{found.path} was saved with --optimizer {saved}, and this run has --optimizer {used}: use the same, or"
            " add --no-load-optim"
        )
    if metadata["distributed_optimizer"] != state.optimizer.config.use_distributed_optimizer:
        raise ValueError(
            f"{found.path} was saved {'with' if metadata['distributed_optimizer'] else 'without'}"
            " --use-distributed-optimizer: use the same setting, or add --no-load-optim"
        )
    trained = metadata.get("trained_weights", TrainingState.trained_weights)
    if trained != state.trained_weights:
        raise ValueError(
            f"{found.path} was saved with {trained}, and this run has {state.trained_weights}: the optimizer's state"
            " belongs to other weights; train the same weights, or add --no-load-optim"
        )


def save_model_only(model: GPTModel, folder: Path) -> Path:
    """Write the model as the converted checkpoint `folder/release`; collective. Returns that folder.

    Only the vocabulary's padding depends on the layout of the writer, and loading adapts it.
    """
    root = Path(folder)
    run_on_rank_zero(lambda: checkpoint_folder.begin(root, None))
    partial = checkpoint_folder.partial_path(root, None)
    prepared = io.prepare({"model": _sharded([model])}, {"content": "model"}, io.Division())
    checksums = io.write(prepared, partial)
    run_on_rank_zero(lambda: io.write_common(prepared, partial))
    run_on_rank_zero(lambda: checkpoint_folder.write_checksums(partial, checksums))
    run_on_rank_zero(lambda: checkpoint_folder.commit(root, None))
    return root / checkpoint_folder.RELEASE


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
    loaded = io.read({"model": _sharded(stages)}, found.path, model_only=True)
    for number, stage in enumerate(stages):
        _fill(stage, loaded["model"][str(number)], found.path)
    return found


def load_stage_adapters(stages: Sequence[GPTModel], folder: Path) -> None:
    """Fill the adapters of this rank's `stages` from the checkpoint's own `folder`; collective.

    Raises ValueError if it has no adapters, or others.
    """
    if not any(map(is_adapter, io.stored_names(folder))):
        raise ValueError(
            f"{folder} has weights and no adapters, and --lora-rank continues a run with adapters: give it as"
            " --ref-load, which makes it the base, or leave out --lora-rank"
        )
    loaded = io.read({"model": _sharded(stages, adapters=True)}, folder, model_only=True)
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
    wanted = _sharded(stages)
    for part in wanted.values():
        part.pop(VALUE_HEAD, None)
    loaded = io.read({"model": wanted}, folder, model_only=True, ignored=(OUTPUT_LAYER,))["model"]
    for number, stage in enumerate(stages):
        heads = {name: value for name, value in stage.state_dict().items() if name == VALUE_HEAD}
        _fill(stage, loaded[str(number)] | heads, folder)


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
