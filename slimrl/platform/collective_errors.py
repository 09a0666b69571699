"""Steps that succeed or fail on all ranks together, so that no rank waits in a collective for a failed one.

`run_on_all_ranks` and `run_on_rank_zero` are for files that other ranks depend on (checkpoints, exports). `RankSync` is
for weight updates: it has its own process group and reports whether a failure is final. `ConversionGroup` is for
converters, which are usually one process, but can be several under torchrun. All exchange only small messages; the
groups created here are gloo groups on the CPU. The functions import torch, because the driver, which has none, reads
the errors.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    import torch.distributed as dist

_Result = TypeVar("_Result")
_Failure = tuple[str, bool]  # message, and whether it is final
_FRAME_BYTES, _HEADER_BYTES = 4096, 8  # of one exchange, and of the length that it begins with
_JOIN_TIMEOUT = datetime.timedelta(minutes=10)
RANK_ZERO = 0


class CheckpointError(RuntimeError):
    """Some rank failed to write a checkpoint or an export; earlier complete ones are unchanged."""


def room_left(error: BaseException) -> str:
    """For an OSError of a full disk: the free space of that disk, as text; else ""."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is None:
        return ""
    try:
        free = shutil.disk_usage(Path(error.filename).parent).free
    except OSError:
        return ""
    return f" ({free / 2**30:.2f} GiB are free there)"


def run_on_all_ranks(step: Callable[[], _Result], group: dist.ProcessGroup | None = None) -> _Result:
    """Run `step` on every rank of `group` (None: all ranks) and return its result once all are done; collective.

    Raises CheckpointError on every rank, naming the first failed one, if a step raised OSError, ValueError or
    RuntimeError.
    """
    import torch.distributed as dist

    result: _Result | None = None
    failure: Exception | None = None
    try:
        result = step()
    except (OSError, ValueError, RuntimeError) as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}{room_left(failure)}"
    texts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    for rank, rank_text in enumerate(texts):
        if rank_text is not None:
            raise CheckpointError(f"rank {rank}: {rank_text}") from failure
    return cast("_Result", result)


def run_on_rank_zero(step: Callable[[], object], group: dist.ProcessGroup | None = None) -> None:
    """`run_on_all_ranks` for a step that runs on rank 0 only."""
    import torch.distributed as dist

    run_on_all_ranks(step if dist.get_rank() == 0 else lambda: None, group)


class SyncError(RuntimeError):
    """A step failed on some rank. `final`: a retry cannot help or is not safe."""

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


class RankSync:
    """Runs steps on all training ranks; constructed collectively. `error` is the error class of its steps."""

    def __init__(self, rank: int, error: type[SyncError] = SyncError) -> None:
        import torch.distributed as dist

        self._is_rank_zero = rank == RANK_ZERO
        self._error = error
        self._group = dist.new_group(backend="gloo")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._group.size()

    def close(self) -> None:
        """Destroys its process group; no rank may have a call on it in progress."""
        import torch.distributed as dist

        dist.destroy_process_group(self._group)

    def gather(self, value: _Result) -> list[_Result]:
        """The values of all ranks, in rank order; collective.

        One exchange where `dist.all_gather_object` takes two (sizes, then values), unless a pickled value is long.
        """
        own = pickle.dumps(value)
        frames = self._exchange(len(own).to_bytes(_HEADER_BYTES, "little") + own, _FRAME_BYTES)
        lengths = [int.from_bytes(frame[:_HEADER_BYTES], "little") for frame in frames]
        if max(lengths) > _FRAME_BYTES - _HEADER_BYTES:
            frames = self._exchange(bytes(_HEADER_BYTES) + own, _HEADER_BYTES + max(lengths))
        pairs = zip(frames, lengths, strict=True)
        return [pickle.loads(frame[_HEADER_BYTES : _HEADER_BYTES + length]) for frame, length in pairs]

    def _exchange(self, data: bytes, size: int) -> list[bytes]:
        """The first `size` bytes of every rank's `data`, padded with zeros."""
        import torch
        import torch.distributed as dist

        frame = torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8)
        frames = [torch.empty_like(frame) for _ in range(self.size)]
        dist.all_gather(frames, frame, group=self._group)
        return [one.numpy().tobytes() for one in frames]

    def run_on_all_ranks(self, step: Callable[[], _Result]) -> list[_Result]:
        """Runs `step` on every rank and returns the results of all ranks; collective.

        Raises `error` on every rank if a step raised it, ValueError or OSError on any rank. It is final unless all
        failed steps can be retried; a ValueError or OSError is final, since it would recur.
        """
        result: _Result | None = None
        failure: _Failure | None = None
        cause: Exception | None = None
        try:
            result = step()
        except self._error as error:
            failure, cause = (str(error), error.final), error
        except (ValueError, OSError) as error:
            failure, cause = (str(error), True), error
        outcomes = self.gather((result, failure))
        failures = [failed for _, failed in outcomes if failed is not None]
        if failures:
            text = failures[0][0] if failure is None else failure[0]
            raise self._error(text, final=any(final for _, final in failures)) from cause
        return [cast("_Result", outcome) for outcome, _ in outcomes]

    def run_on_rank_zero(self, step: Callable[[], _Result]) -> _Result:
        """Runs `step` on rank 0 alone; its result on every rank. Collective; raises as `run_on_all_ranks`."""
        results = self.run_on_all_ranks(lambda: step() if self._is_rank_zero else None)
        return cast("_Result", results[RANK_ZERO])


class ConversionGroup:
    """This process is `rank` of `size`; methods that communicate with the others need `joined`."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ConversionGroup:
        """The group given by RANK and WORLD_SIZE, or a group of one without them.

        Raises ValueError if they are incomplete or contradictory.
        """
        if "WORLD_SIZE" not in environment:
            return cls()
        try:
            rank, size = int(environment.get("RANK", "")), int(environment["WORLD_SIZE"])
        except ValueError as error:
            raise ValueError(
                f"WORLD_SIZE is {environment['WORLD_SIZE']!r} and RANK {environment.get('RANK')!r} in the environment:"
                " both must be numbers, as torchrun sets them; unset WORLD_SIZE to convert in one process"
            ) from error
        if not 0 <= rank < size:
            raise ValueError(f"RANK is {rank} and WORLD_SIZE {size} in the environment: RANK must be 0 to {size - 1}")
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if size > 1 and name not in environment:
                raise ValueError(
                    f"WORLD_SIZE is {size} and {name} is missing in the environment: start the processes with"
                    " torchrun, or unset WORLD_SIZE to convert in one process"
                )
        return cls(rank, size)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, which performs the steps of a single process."""
        return self.rank == 0

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Joins the process group for the length of the block. Raises ValueError if other processes do not join."""
        if self.size == 1:
            yield
            return
        import torch.distributed as dist

        try:
            dist.init_process_group(
                "gloo", init_method="env://", rank=self.rank, world_size=self.size, timeout=_JOIN_TIMEOUT
            )
        except dist.DistError as error:
            raise ValueError(
                f"process {self.rank} of {self.size} (RANK, WORLD_SIZE) did not find the others: {error};"
                " unset WORLD_SIZE to convert in one process"
            ) from error
        try:
            yield
        finally:
            dist.destroy_process_group()

    def run_on_all_ranks(self, action: Callable[[], _Result]) -> _Result:
        """Runs `action` in every process and returns once all are done.

        Raises this process's own error, or RuntimeError with the message of the first other process that failed.
        """
        if self.size == 1:
            return action()
        import torch.distributed as dist

        result: _Result | None = None
        own: Exception | None = None
        try:
            result = action()
        except (OSError, ValueError, RuntimeError) as error:
            own = error
        messages: list[str | None] = [None] * self.size
        dist.all_gather_object(messages, None if own is None else str(own))
        if any(message is not None for message in messages):
            # wait until all have the messages: a process that exits closes its connections to the others
            with contextlib.suppress(RuntimeError):
                dist.barrier()
        if own is not None:
            raise own
        for rank, message in enumerate(messages):
            if message is not None:
                raise RuntimeError(f"process {rank} failed: {message}")
        return cast("_Result", result)
