"""The content of a checkpoint: a training rank's state, saved and restored, and what a model's checkpoint would have.

Any parallel layout can read a checkpoint, except the random number generators, which have one entry per rank and are
restored only in the same layout. The trainer saves and restores model, optimizer, schedule, random state and data
position (`checkpoint.saver` writes them); the converters use the model only.

`model_blueprint` returns the keys, shapes, dtypes and blocks of `sharded_state_dict` for any layer spec: the model is
built, but its weights have no values and no memory, and nothing is put on a GPU. A checkpoint is the same with and
without Transformer Engine, so megatron-core's own layers are used. The converter to torch_dist fills in the values.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.serialization import (
    _CONTENT_METADATA_KEY,
    get_default_save_common_strategy,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.overrides import TorchFunctionMode

from slimrl.arguments import Arguments
from slimrl.arguments.checkpoints import SIZES
from slimrl.megatron import parallel
from slimrl.megatron.checkpoint import folder as checkpoint_folder
from slimrl.megatron.checkpoint import io
from slimrl.megatron.checkpoint.folder import CheckpointFolder
from slimrl.megatron.checkpoint.optimizer_state import after_load, convert_step_format, step_counts, sync_step_count
from slimrl.megatron.checkpoint.saver import Snapshot
from slimrl.megatron.model.model_builder import CustomModel, build_model
from slimrl.megatron.model.output_layer import ValueModel
from slimrl.megatron.parallel import ParallelState
from slimrl.models.adapters import is_adapter
from slimrl.models.families.param_mapping import VALUE_HEAD
from slimrl.platform.collective_errors import run_on_rank_zero
from slimrl.weights.adapters import adapted_layers
from slimrl.weights.convert.torch_dist_writer import Blueprint, Piece, Weight


def layout(parallel: ParallelState) -> list[int]:
    """The sizes along the axes; states can only go back to ranks of the same layout."""
    return [parallel.pp_size, parallel.tp_size, parallel.dp_size * parallel.cp_size]


def sharded(parallel: ParallelState) -> ShardedObject:
    """This rank's generators as its own shard of the entry `rng_state`."""
    place = (parallel.pp_rank, parallel.tp_rank, parallel.dp_cp_group.rank())
    return ShardedObject("rng_state", capture(), tuple(layout(parallel)), place)


def capture() -> dict[str, Any]:
    """The state of every generator of this process, as plain data and tensors."""
    found: Any = numpy.random.get_state()
    kind, keys, position, has_gauss, gauss = found
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
    model = sharded_weights(state.stages, sharding, adapters=_has_adapters(state.stages))
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
        model = sharded_weights(state.stages, sharding, adapters=_has_adapters(state.stages))
        wanted["optimizer"] = state.optimizer.sharded_state_dict(model, is_loading=True, metadata=sharding)
    same_layout = metadata.get("layout") == layout(state.parallel)
    if load_random_state and same_layout:
        wanted["rng_state"] = sharded(state.parallel)
    elif load_random_state:
        _logger.info("%s was saved in another parallel layout: its random state is not restored", found.path)
    loaded = io.read(wanted, found.path, model_only=False)
    if load_optimizer:
        convert_step_format(loaded["optimizer"], state.optimizer)
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


def sharded_weights(
    stages: Sequence[GPTModel], sharding: dict[str, Any] | None = None, *, adapters: bool = False
) -> ShardedStateDict:
    """The parameters of each stage under its number; the files have global names.

    With `adapters` what is trained of a model with adapters: these, and the head of a critic. Else all but these.
    """
    return {
        str(number): {
            name: entry
            for name, entry in stage.sharded_state_dict(metadata=sharding).items()
            if is_adapter(name) == adapters or (adapters and name == VALUE_HEAD)
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
    prepared = io.prepare({"model": sharded_weights([model])}, {"content": "model"}, io.Division())
    checksums = io.write(prepared, partial)
    run_on_rank_zero(lambda: io.write_common(prepared, partial))
    run_on_rank_zero(lambda: checkpoint_folder.write_checksums(partial, checksums))
    run_on_rank_zero(lambda: checkpoint_folder.commit(root, None))
    return root / checkpoint_folder.RELEASE


_FACTORIES = (
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn),
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
)
_INITIALISERS = (torch.nn.init.normal_, torch.Tensor.normal_)  # nothing to fill; skipping them saves their overhead


class _WithoutMemory(TorchFunctionMode):
    """Creates every new tensor on the meta device, even if the caller names a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _INITIALISERS:
            return args[0] if args else kwargs["tensor"]
        if func in _FACTORIES:
            kwargs["device"] = torch.device("meta")
            kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def model_blueprint(args: Arguments, folder: Path | None = None) -> Blueprint:
    """The contents of a checkpoint of the model of `args`, as if one process saved it.

    Opens and closes torch.distributed and megatron-core's groups for this process alone. `args` must have no
    parallelism; --transformer-impl is ignored. If `folder` is given, also writes megatron-core's own small files of a
    checkpoint into it.
    """
    # Transformer Engine (--spec may build its layers) allocates meta weights on the GPU, unless disabled
    args = dataclasses.replace(args, transformer_impl="local", init_model_with_meta_device=True)
    # a private store: with an address torch would use torchrun's store, where no other process connects
    state = parallel.initialize(args, rank=0, world_size=1, init_method=dist.HashStore())
    try:
        with _WithoutMemory():
            model = build_model(
                args, dataclasses.replace(state, device=torch.device("meta")), CustomModel.from_args(args)
            )
        stored = model.sharded_state_dict()
        if folder is not None:
            get_default_save_common_strategy().save_common({_CONTENT_METADATA_KEY: {"content": "model"}}, folder)
            save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    finally:
        parallel.shutdown()
    weights = tuple(_weight(name, entry) for name, entry in stored.items() if not isinstance(entry, ShardedObject))
    return Blueprint(weights, _objects([entry for entry in stored.values() if isinstance(entry, ShardedObject)]))


def _weight(name: str, entry: ShardedTensor | ShardedTensorFactory) -> Weight:
    if isinstance(entry, ShardedTensorFactory):
        blocks = _built(entry)
        return Weight(name, tuple(map(_piece, blocks)), _cut_like(entry))
    return Weight(name, (_piece(entry),), lambda values: [values])


def _built(factory: ShardedTensorFactory) -> list[ShardedTensor]:
    built = factory.build()
    return [built] if isinstance(built, ShardedTensor) else list(nested_values(built))


def _cut_like(factory: ShardedTensorFactory) -> Callable[[Tensor], Sequence[Tensor]]:
    """The factory's split, applied to real values."""
    return lambda values: [block.data for block in _built(dataclasses.replace(factory, data=values))]


def _piece(block: ShardedTensor) -> Piece:
    """Prepended axes (layers, experts) have length 1 in a block."""
    return Piece(
        key=block.key,
        offsets=tuple(block.global_offset),
        sizes=(1,) * block.prepend_axis_num + tuple(block.local_shape),
        full=tuple(block.global_shape),
        dtype=block.dtype,
    )


def _objects(entries: list[ShardedObject]) -> dict[str, bytes]:
    """megatron-core stores an object as a list of one."""
    objects = {}
    for entry in entries:
        buffer = BytesIO()
        torch.save([entry.data], buffer)
        objects[entry.unique_key] = buffer.getvalue()
    return objects
