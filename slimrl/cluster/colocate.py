"""Whose the GPUs' memory is: training's or the engines', each in its turn.

Owns the order in which memory changes hands around training and around a weight update, and times every change. With
neither side offloaded it does nothing. Promises that the two sides together never hold more than one of them and the
weights of the other. Used by `Run`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from slimrl.engines.sglang.engine_memory import CUDA_GRAPHS, KV_CACHE, WEIGHTS


class Training(Protocol):
    """The training side, where it is offloaded."""

    def sleep(self, *, keep_weights: bool) -> None: ...

    def wake(self) -> None: ...


class Engines(Protocol):
    """The engines' side, where it is offloaded."""

    def release(self) -> None: ...

    def resume(self, tags: Sequence[str]) -> None: ...


class ColocatedMemory:
    """The engines start released, training starts awake: it is its turn to load weights."""

    def __init__(
        self,
        training: Training | None,
        engines: Engines | None,
        timed: Callable[[str], AbstractContextManager[None]],
        *,
        tokens_during_weight_update: bool = False,
    ) -> None:
        """None stands for a side that is not offloaded, or not there; `timed(phase)` measures a block.

        `tokens_during_weight_update`: a weight update ends with a token from some engine, which needs its KV cache for
        that.
        """
        self._training = training
        self._engines = engines
        self._timed = timed
        self._with_weight_update = (WEIGHTS, KV_CACHE, CUDA_GRAPHS) if tokens_during_weight_update else (WEIGHTS,)
        self._after_weight_update = () if tokens_during_weight_update else (KV_CACHE, CUDA_GRAPHS)
        self._engines_are_released = True
        self._training_sleeps = False

    @property
    def training_sleeps(self) -> bool:
        """Whether the trained weights are off their GPUs."""
        return self._training_sleeps

    def onload_trainer(self) -> None:
        """From generating to training: the engines' memory first, then training wakes up in it."""
        if self._engines is not None and not self._engines_are_released:
            with self._timed("release_engines"):
                self._engines.release()
            self._engines_are_released = True
        if self._training is not None and self._training_sleeps:
            with self._timed("wake_training"):
                self._training.wake()
            self._training_sleeps = False

    @contextlib.contextmanager
    def weight_update(self) -> Iterator[None]:
        """From training to generating: within the block both sides have their weights, and little else."""
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
            self._training_sleeps = True

    def _resume(self, tags: Sequence[str]) -> None:
        if self._engines is not None:
            with self._timed("resume_engines"):
                self._engines.resume(tags)
