"""Orders the offload and onload of trainers and engines on shared GPUs.

Sequences and times the memory transitions around training and around a weight update; does nothing if neither side is
offloaded. Invariant: at most one side is fully resident, plus the weights of the other. Used by `Run`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from slimrl.engines.server_protocol import CUDA_GRAPHS, KV_CACHE, WEIGHTS, ReleasableMemory


class Training(Protocol):
    """The offloadable training side."""

    def sleep(self, *, keep_weights: bool) -> None: ...

    def wake(self) -> None: ...


class ColocatedMemory:
    """Initially the engines are released and training is onloaded, to load its weights."""

    def __init__(
        self,
        training: Training | None,
        engines: ReleasableMemory | None,
        timed: Callable[[str], AbstractContextManager[None]],
        *,
        tokens_during_weight_update: bool = False,
    ) -> None:
        """None stands for a side that is absent or not offloaded; `timed(phase)` measures a block.

        `tokens_during_weight_update`: a weight update ends by generating a token, so the engines need their KV cache.
        """
        self._training = training
        self._engines = engines
        self._timed = timed
        self._with_weight_update = (WEIGHTS, KV_CACHE, CUDA_GRAPHS) if tokens_during_weight_update else (WEIGHTS,)
        self._after_weight_update = () if tokens_during_weight_update else (KV_CACHE, CUDA_GRAPHS)
        self._engines_are_released = True
        self._training_offloaded = False

    @property
    def training_offloaded(self) -> bool:
        """Whether the trained weights are off their GPUs."""
        return self._training_offloaded

    def onload_trainer(self) -> None:
        """Switches from generation to training: releases the engines' memory, then onloads the trainers."""
        if self._engines is not None and not self._engines_are_released:
            with self._timed("release_engines"):
                self._engines.release()
            self._engines_are_released = True
        if self._training is not None and self._training_offloaded:
            with self._timed("wake_training"):
                self._training.wake()
            self._training_offloaded = False

    @contextlib.contextmanager
    def weight_update(self) -> Iterator[None]:
        """Switches from training to generation; within the block both sides hold their weights and little else."""
        self._offload_trainer(keep_weights=True)
        self._resume(self._with_weight_update)
        yield
        self._offload_trainer(keep_weights=False)
        if self._after_weight_update:
            self._resume(self._after_weight_update)
        self._engines_are_released = False

    def _offload_trainer(self, *, keep_weights: bool) -> None:
        if self._training is not None:
            with self._timed("park_training"):
                self._training.sleep(keep_weights=keep_weights)
            self._training_offloaded = True

    def _resume(self, tags: Sequence[str]) -> None:
        if self._engines is not None:
            with self._timed("resume_engines"):
                self._engines.resume(tags)
