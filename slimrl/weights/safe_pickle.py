"""Opens the pickles of a checkpoint without executing code from them.

A pickle names functions that its reader calls. Only functions on an allow-list of harmless ones are called; anything
else raises an error with its name, the file and a fix. Used wherever slimrl reads a checkpoint, and patched into
megatron-core's and torch's own readers by `slimrl.megatron.patches`.
"""

from __future__ import annotations

import enum
import io
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

METADATA_NAME = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_FILES = "torch.distributed.checkpoint.filesystem"
_EARLIER = "torch.distributed._shard.sharded_tensor.metadata"  # module of TensorProperties before torch 2.3
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_ENGINE = "transformer_engine.common.recipe"
# (module, name) of everything in a torch_dist checkpoint's .metadata, except dtypes
_OF_METADATA = frozenset(
    {
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        (_EARLIER, "TensorProperties"),
        (_EARLIER, "MEM_FORMAT_ENCODING"),
        (_FILES, "_StorageInfo"),
        (_FILES, "_StoragePrefix"),
        # plans, which megatron-core stores there optionally
        (_PLANNER, "SavePlan"),
        (_PLANNER, "WriteItem"),
        (_PLANNER, "WriteItemType"),
        (_PLANNER, "TensorWriteData"),
        (_PLANNER, "BytesIOWriteData"),
        (_MEGATRON, "MCoreMetadata"),
        (_MEGATRON, "MCoreSavePlan"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),  # looks a name up in a table
        ("collections", "OrderedDict"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # as newer Pythons write it
    }
)
# of the state of Transformer Engine's modules besides their weights: tensors, numbers, and the fp8 recipe
_OF_EXTRA_STATE = frozenset(
    {
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.storage", "_load_from_bytes"),  # answered by `load_plain`
        ("collections", "OrderedDict"),
        *(
            (_ENGINE, name)
            for name in (
                "Format",
                "_FormatHelper",
                "_FormatHelperFP4",
                "MMParams",
                "QParams",
                "_OverrideLinearPrecision",
                "DelayedScaling",
                "Float8CurrentScaling",
                "Float8BlockScaling",
                "MXFP8BlockScaling",
                "NVFP4BlockScaling",
            )
        ),
    }
)

# numbers and arrays of numpy, by what a dtype of theirs is an instance of
_NUMPY_DTYPES = (
    *("Bool", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64"),
    *("Float16", "Float32", "Float64", "Complex64", "Complex128", "Str", "Bytes"),
)
_NUMPY_CORES = ("numpy._core.multiarray", "numpy.core.multiarray")  # of numpy 2, and before
_FACTORIES = (int, float, str, list, dict, set, tuple, bool)  # of a defaultdict
# of the arguments that Megatron keeps in common.pt; older ones were in the second place
_MODEL_TYPES = ("megatron.core.enums", "megatron.core.transformer.enums")


class UnsafePickleError(ValueError):
    """A file names something that is not on the allow-list of checkpoints; opening it would call that."""


class _Unpickler(pickle.Unpickler):
    """Finds what `admitted` lists, and torch's dtypes; raises UnsafePickleError for everything else."""

    def __init__(self, file: IO[bytes], where: str, admitted: frozenset[tuple[str, str]]) -> None:
        super().__init__(file)
        self._where = where
        self._admitted = admitted

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if f"{module}.{name}" in _GETATTR:
            return self._enum_member
        if (module, name) not in self._admitted:
            raise _refused(self._where, f"{module}.{name}")
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda content: load_plain(io.BytesIO(content), self._where)
        return super().find_class(module, name)

    def _enum_member(self, *asked: Any) -> enum.Enum:
        try:
            return _enum_member(*asked)
        except pickle.UnpicklingError:
            raise _refused(self._where, "builtins.getattr") from None


def read_metadata(folder: str | Path) -> Metadata:
    """The parsed file `.metadata` of the torch_dist checkpoint `folder`.

    Raises UnsafePickleError for one that needs anything beyond torch's format, and ValueError for a damaged one or one
    that places tensors outside the folder.
    """
    path = Path(folder) / METADATA_NAME
    try:
        with path.open("rb") as file:
            metadata: Metadata = _Unpickler(file, str(path), _OF_METADATA).load()
    except (OSError, UnsafePickleError):
        raise
    except Exception as error:  # damaged bytes may decode to any instruction with any arguments
        raise ValueError(f"{path} is damaged ({error}): copy the checkpoint again") from error
    # megatron-core 0.15 wrote its own class with the same attributes
    if not all(isinstance(getattr(metadata, name, None), dict) for name in ("state_dict_metadata", "storage_data")):
        raise ValueError(f"{path} is damaged (it holds {type(metadata).__name__}): copy the checkpoint again")
    for index, info in metadata.storage_data.items():
        name = getattr(info, "relative_path", None)
        if not isinstance(name, str) or name == ".." or Path(name).name != name or not name:
            raise ValueError(
                f"{path} says that {getattr(index, 'fqn', index)} is in {name!r}, which is no file of this folder:"
                " copy the checkpoint from where it was made"
            )
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


def load_plain(file: IO[bytes] | Path, where: str | Path) -> Any:
    """As torch.load on the CPU: tensors, plain data, numpy's numbers and arrays, and what megatron-core calls harmless.

    A defaultdict comes as a dict.

    Raises UnsafePickleError, naming `where` and the forbidden name, if the file has anything else.
    """
    try:
        with torch.serialization.safe_globals(_plain()):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refused(str(where), _asked_for(file) or _complaint(error)) from error


def check_extra_state(value: Any, where: str) -> None:
    """Raises UnsafePickleError if module state that Transformer Engine would unpickle has more than such state needs.

    `value` is the loaded state; Transformer Engine unpickles only bytes in a uint8 tensor.
    """
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.numel():
        _Unpickler(io.BytesIO(value.cpu().numpy().tobytes()), where, _OF_EXTRA_STATE).load()


def _asked_for(file: IO[bytes] | Path) -> str | None:
    """The names in an archive of torch.save that are not allowed; None if it is not such an archive."""
    if not isinstance(file, Path):
        file.seek(0)
    try:
        with torch.serialization.safe_globals(_plain()):
            return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))) or None
    except (RuntimeError, ValueError, pickle.UnpicklingError):
        return None


def _complaint(error: pickle.UnpicklingError) -> str:
    """torch's reason, without its advice to load the file unsafely."""
    reason = re.search(r"WeightsUnpickler error:\s*(.*)", str(error))
    return f"more than plain data ({reason[1].strip() if reason else str(error).splitlines()[0]})"


_GETATTR = ("builtins.getattr", "getattr", "__builtin__.getattr")  # by pickle's protocol and reader
_Admitted = Callable[..., Any] | tuple[Callable[..., Any], str]


def _plain() -> list[_Admitted]:
    """The types that `load_plain` allows in addition to torch's list, each with its name in the file."""
    makers: list[Any] = [value.__reduce__()[0] for value in (numpy.array(0), numpy.float64(0))]
    numpys = [(make, f"{core}.{make.__name__}") for core in _NUMPY_CORES for make in makers]
    numpys += [(numpy.ndarray, "numpy.ndarray"), (numpy.dtype, "numpy.dtype")]
    dtypes = [getattr(numpy.dtypes, f"{name}DType") for name in _NUMPY_DTYPES]
    types = [(kind, f"{kind.__module__}.{kind.__qualname__}") for kind in (*_FACTORIES, *dtypes)]
    types.append((lambda *factory: {}, "collections.defaultdict"))  # torch cannot fill a defaultdict
    # not imported here: if Megatron is not loaded, none of its classes are needed
    enums = [(module.ModelType, f"{name}.ModelType") for name in _MODEL_TYPES if (module := sys.modules.get(name))]
    return [*numpys, *types, *enums, *((_enum_member, name) for name in _GETATTR)]


def _enum_member(*asked: Any) -> enum.Enum:
    """Replaces getattr, with which Python 3.11.0 to 3.11.3 write a member of an enum; its class must be allowed too."""
    if len(asked) == 2 and isinstance(asked[0], enum.EnumMeta) and asked[1] in asked[0].__members__:
        return asked[0][asked[1]]
    raise pickle.UnpicklingError("WeightsUnpickler error: getattr of something else than an enum")


def _refused(where: str, what: str) -> UnsafePickleError:
    return UnsafePickleError(
        f"{where} asks for {what}, which is not among what a checkpoint is known to need and might run anything when"
        " the file is opened: nothing of it was run; take the checkpoint again from where it was made, or have it saved"
        " with plain values in that place"
    )
