"""Steps that succeed or fail on all ranks together, so that no rank waits in a collective for one that failed.

`run_on_all_ranks` and `run_on_rank_zero` are for files that other ranks rely on (checkpoints, exports). `RankSync` is
for weight updates: it has its own process group and says of a failure whether it is final. `ConversionGroup` is for
converters, which torchrun may start as several processes and which are usually one. All exchange small messages only;
the groups that are made here are gloo groups on the CPU.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

_Result = TypeVar("_Result")
_Failure = tuple[str, bool]  # what it says, and whether it is final
_JOIN_TIMEOUT = datetime.timedelta(minutes=10)
RANK_ZERO = 0


class CheckpointError(RuntimeError):
    """A checkpoint or an export was not written on some rank; what was complete before is as it was."""


def room_left(error: BaseException) -> str:
    """For an OSError of a disk without room: how much is left where it was written; else nothing."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is None:
        return ""
    try:
        free = shutil.disk_usage(Path(error.filename).parent).free
    except OSError:
        return ""
    return f" ({free / 2**30:.2f} GiB are free there)"


def run_on_all_ranks(step: Callable[[], _Result], group: dist.ProcessGroup | None = None) -> _Result:
    """Run `step` on every rank of `group` (None: all ranks) and return its result once all are done; collective.

    Raises CheckpointError on every rank, naming the first that failed, where a step ended with an OSError, ValueError
    or RuntimeError.
    """
    result: _Result | None = None
    failure: Exception | None = None
    try:
        result = step()
    except (OSError, ValueError, RuntimeError) as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}{room_left(failure)}"
    texts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    for rank, found in enumerate(texts):
        if found is not None:
            raise CheckpointError(f"rank {rank}: {found}") from failure
    return cast("_Result", result)


def run_on_rank_zero(step: Callable[[], object], group: dist.ProcessGroup | None = None) -> None:
    """`run_on_all_ranks` for what rank 0 does alone."""
    run_on_all_ranks(step if dist.get_rank() == 0 else lambda: None, group)


class SyncError(RuntimeError):
    """A step failed on some rank. `final`: doing it once more cannot help, or is not safe."""

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


class RankSync:
    """Runs steps on all training ranks; made collectively over all of them. `error` is what its steps raise."""

    def __init__(self, rank: int, error: type[SyncError] = SyncError) -> None:
        self._is_rank_zero = rank == RANK_ZERO
        self._error = error
        self._everyone = dist.new_group(backend="gloo")

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._everyone.size()

    def close(self) -> None:
        """Gives its process group up; no rank may have a call on it in progress."""
        dist.destroy_process_group(self._everyone)

    def gather(self, value: _Result) -> list[_Result]:
        """The values of all ranks, in their order; collective."""
        values: list[_Result] = [value] * self.size
        dist.all_gather_object(values, value, group=self._everyone)
        return values

    def run_on_all_ranks(self, step: Callable[[], _Result]) -> list[_Result]:
        """Runs `step` on every rank and returns what each rank's returned; collective.

        Raises the sync's error on every rank where a step raised that, ValueError or OSError on one. It is final unless
        all that failed may be tried again: an error of the trainer itself comes back with the next attempt.
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
    """This process is `rank` of `size`; methods that talk to the others need `joined`."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ConversionGroup:
        """The place that RANK and WORLD_SIZE give, a group of one without them.

        Raises ValueError where they are incomplete or contradict each other.
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
        """Whether this process does what only one may do."""
        return self.rank == 0

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Waits for the other processes, and leaves them at the end. Raises ValueError where they do not come."""
        if self.size == 1:
            yield
            return
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

        Raises this process' own error, or RuntimeError with the sentence of the first other that failed.
        """
        if self.size == 1:
            return action()
        result: _Result | None = None
        own: Exception | None = None
        try:
            result = action()
        except (OSError, ValueError, RuntimeError) as error:
            own = error
        messages: list[str | None] = [None] * self.size
        dist.all_gather_object(messages, None if own is None else str(own))
        if any(message is not None for message in messages):
            # nobody leaves before all have the messages: a process that ends closes the connections of the others
            with contextlib.suppress(RuntimeError):
                dist.barrier()
        if own is not None:
            raise own
        for rank, message in enumerate(messages):
            if message is not None:
                raise RuntimeError(f"process {rank} failed: {message}")
        return cast("_Result", result)
