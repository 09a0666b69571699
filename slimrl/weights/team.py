"""The processes that convert one checkpoint together, as torchrun starts them; usually just one.

Promises that all of them go on or none does: an error in one ends the others with its sentence. Only small
messages are exchanged (gloo on the CPU); the tensors go through the shared file system. Called by the converters.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch.distributed as dist

_Result = TypeVar("_Result")
_JOINING = datetime.timedelta(minutes=10)


class Team:
    """This process' number `rank` among `size`; methods that talk to the others need `joined`."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Team:
        """The place that RANK and WORLD_SIZE give, a team of one without them.

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
    def leads(self) -> bool:
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
                "gloo", init_method="env://", rank=self.rank, world_size=self.size, timeout=_JOINING
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

    def together(self, action: Callable[[], _Result]) -> _Result:
        """Runs `action` in every process and returns once all are done.

        Raises this process' own error, or RuntimeError with the sentence of the first other that failed.
        """
        if self.size == 1:
            return action()
        result, own = None, None
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
        return result
