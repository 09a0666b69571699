"""Reads the tensors of a torch_dist checkpoint from its files into the memory where they are used.

`DirectReads` replaces how torch's reader reads: that one loads each stored block into new memory and copies the wanted
part from there. Here only the wanted part is read, straight into the target if that is on the CPU, and every block of
1 MiB of a file is read and verified once, in the order of the file.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from slimrl.weights.checkpoint_checksums import BLOCK, CheckedFolder, read_at
from slimrl.weights.hf_checkpoint_writer import byte_array

_KEPT_BLOCKS = 4  # of the file, for the parts of tensors that share a block


class DirectReads:
    """A mixin for torch's FileSystemReader; set `checked` to verify what is read."""

    checked: CheckedFolder | None = None

    def read_data(self: Any, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the tensors of `plan`.

        Raises DamagedFileError if bytes differ from those that were written, ValueError if a file does not match the
        metadata.
        """
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            per_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in per_file.items():
            with OpenedFile(Path(self.path) / name, self.checked) as file:
                _read_items(file, sorted(items, key=lambda item: self._place(item).offset), self._place, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self: Any, item: ReadItem) -> Any:
        """Offset and length of an item's archive in its file. Raises ValueError if it is stored compressed."""
        info = self.storage_data[item.storage_index]
        if info.transform_descriptors:
            raise ValueError(
                f"{self.path}: {item.storage_index.fqn} is stored compressed"
                f" ({', '.join(info.transform_descriptors)}), which cannot be read: save the checkpoint without"
                " transforms"
            )
        return info


class OpenedFile:
    """One file of a checkpoint, open for reads in ascending order; not for several threads."""

    def __init__(self, path: Path, checked: CheckedFolder | None) -> None:
        self.path = path
        self._checked = checked
        self._descriptor = os.open(path, os.O_RDONLY)
        self._size = os.fstat(self._descriptor).st_size
        self._kept: dict[int, memoryview] = {}

    def __enter__(self) -> OpenedFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._descriptor)

    def read_into(self, begin: int, view: memoryview) -> int:
        """Fills `view` with the verified bytes from `begin` on; returns their number, fewer only at the file's end."""
        if self._checked is None:
            return read_at(self._descriptor, begin, view)
        end = min(begin + len(view), self._size)
        place = begin
        while place < end:
            number, inside = divmod(place, BLOCK)
            whole = (end - place) // BLOCK * BLOCK if inside == 0 else 0
            if whole:
                part = view[place - begin : place - begin + whole]
                count = self._checked.read_into(self._descriptor, self.path.name, place, part)
            else:
                block = self._block(number)
                part = block[inside : min(len(block), inside + end - place)]
                view[place - begin : place - begin + len(part)] = part
                count = len(part)
            if count == 0:
                break
            place += count
        return max(0, place - begin)

    def _block(self, number: int) -> memoryview:
        """A block that several reads need parts of."""
        if (block := self._kept.get(number)) is None:
            block = memoryview(bytearray(max(0, min(BLOCK, self._size - number * BLOCK))))
            assert self._checked is not None
            self._checked.read_into(self._descriptor, self.path.name, number * BLOCK, block)
            while len(self._kept) >= _KEPT_BLOCKS:
                del self._kept[next(iter(self._kept))]
            self._kept[number] = block
        return block


class _Part(io.RawIOBase):
    """The bytes of one archive in a file, as a file."""

    def __init__(self, file: OpenedFile, begin: int, length: int) -> None:
        self._file, self._begin, self._length = file, begin, length
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence] + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._place)]
        count = self._file.read_into(self._begin + self._place, view)
        self._place += count
        return count


@dataclasses.dataclass(frozen=True)
class StoredValues:
    """The values of one archive: contiguous, from byte `begin` of the file on."""

    begin: int
    shape: torch.Size
    dtype: torch.dtype


def locate(file: OpenedFile, begin: int, length: int, key: str) -> StoredValues:
    """Where the values of the tensor are that torch.save wrote at `begin`; reads only the archive's directory.

    Raises ValueError if it cannot be read.
    """
    archive = cast("IO[bytes]", _Part(file, begin, length))
    try:
        empty = torch.load(archive, map_location="meta", weights_only=True)
    except RuntimeError as error:  # torch's archive reader has no specific error
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise ValueError(f"{file.path}: {key} cannot be read ({reason}): the checkpoint is damaged") from error
    if not isinstance(empty, Tensor) or not empty.is_contiguous():
        raise ValueError(f"{file.path}: {key} is not a contiguous tensor: save the checkpoint with slimrl or Megatron")
    start: int = empty.untyped_storage()._checkpoint_offset or 0
    inside = start + int(empty.storage_offset()) * empty.dtype.itemsize
    return StoredValues(begin + inside, empty.shape, empty.dtype)


def _read_items(file: OpenedFile, items: Iterable[ReadItem], place: Any, planner: LoadPlanner) -> None:
    """Reads the items of one file, which are in the order of their archives."""
    at, stored = -1, None
    for item in items:
        info, key = place(item), item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO:
            content = bytearray(info.length)
            _fill(file, info.offset, memoryview(content), key)
            planner.load_bytes(item, io.BytesIO(content))
            continue
        if stored is None or at != info.offset:
            at, stored = info.offset, locate(file, info.offset, info.length, key)
        target = planner.resolve_tensor(item).detach()
        if target.shape != item.lengths:
            raise ValueError(f"{key} has shape {list(target.shape)} and {list(item.lengths)} are read")
        read_part(file, stored, item.storage_offsets, target, key)
        planner.commit_tensor(item, target)


def read_part(file: OpenedFile, stored: StoredValues, offsets: Sequence[int], target: Tensor, key: str) -> None:
    """Fills `target`, of any device and dtype, with its shape's elements of the stored tensor from `offsets` on."""
    strides = [1] * len(stored.shape)
    for axis in range(len(strides) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * stored.shape[axis + 1]
    if any(low + size > full for low, size, full in zip(offsets, target.shape, stored.shape, strict=True)):
        raise ValueError(f"{file.path}: {key} is stored with shape {list(stored.shape)}: the checkpoint is damaged")
    if target.numel() == 0:
        return
    first = sum(low * stride for low, stride in zip(offsets, strides, strict=True))
    run = 1 + sum((size - 1) * stride for size, stride in zip(target.shape, strides, strict=True))
    begin = stored.begin + first * stored.dtype.itemsize
    direct = target.device.type == "cpu" and target.dtype == stored.dtype and target.is_contiguous()
    if direct and run == target.numel():
        _fill(file, begin, byte_array(target).data, key)
        return
    values = torch.empty(run, dtype=stored.dtype)  # from the first to the last element of the part
    _fill(file, begin, byte_array(values).data, key)
    target.copy_(values.as_strided(tuple(target.shape), strides))


def _fill(file: OpenedFile, begin: int, view: memoryview, key: str) -> None:
    if file.read_into(begin, view) < len(view):
        raise ValueError(f"{file.path} ends inside {key}: the checkpoint is damaged")
