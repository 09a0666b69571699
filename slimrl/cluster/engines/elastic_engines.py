"""Engines on more GPUs than the run reserves, which join and leave while it runs (`--rollout-max-num-gpus`).

The GPUs of each such engine are a placement group of their own, which Ray fills when a node has so many free, such as a
spot machine that has joined the cluster; an autoscaler sees it as demand. `EngineRecovery` starts the engine, sends it
the run's weights before it serves, and lets go of it when it is lost. Runs in the rollout manager.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ray.exceptions import RayError

from slimrl.arguments import Arguments
from slimrl.cluster.engines.engine import Engine, EngineActorConfig
from slimrl.cluster.engines.engine_group import server_settings
from slimrl.cluster.launch import Launch
from slimrl.cluster.nodes.comparison import NodesDifferError, check_node
from slimrl.cluster.nodes.logs import NodeLogs
from slimrl.cluster.placement import EnginePart, ExtraBundles, PlacementPlan

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
UNUSABLE_PAUSE_S = 60.0  # before GPUs are asked for again, after a node that cannot be used or a server that failed


class ElasticEngine(Engine):
    """An engine that the run can go on without."""

    lost_message, started_message = "its GPUs are returned to Ray", "joined"


class ElasticEngines:
    """The places for engines that may join; each is empty or has one engine at a time."""

    def __init__(self, args: Arguments, plan: PlacementPlan, launch: Launch) -> None:
        self._args, self._launch = args, launch
        self._first_gpu, self._first_index = plan.total, len(plan.rollout) // plan.per_engine
        self._config = EngineActorConfig(Path(args.run_dir).absolute() / "logs", args.log_level, launch.actor_setup())
        self._logs, self._following = NodeLogs(self._config.log_dir), threading.Lock()
        extra = (args.rollout_max_num_gpus or args.rollout_gpus) - args.rollout_gpus
        self.places = range(extra // plan.per_engine)
        self._lives = [itertools.count() for _ in self.places]
        self._held: dict[int, ExtraBundles] = {}
        self._not_before = [0.0 for _ in self.places]  # when GPUs may be asked for
        self._reported: set[str] = set()  # why GPUs could not be used

    @classmethod
    def from_args(cls, args: Arguments, plan: PlacementPlan, launch: Launch) -> ElasticEngines | None:
        """None without the flag."""
        return None if args.rollout_max_num_gpus is None else cls(args, plan, launch)

    async def next_engine(self, place: int, wanted: Callable[[], bool]) -> ElasticEngine:
        """Waits for free GPUs and returns the engine that is to be started there.

        While `wanted` returns false no GPUs are asked for: the run's own engines need them first.
        """
        while True:
            await asyncio.sleep(max(self._not_before[place] - time.monotonic(), 0.0))
            while not wanted():
                await asyncio.sleep(LOOK_INTERVAL_S)
            bundles = ExtraBundles(self._first_gpu + place * self._per_engine, self._per_engine)
            self._held[place] = bundles
            if await self._reserved(bundles, wanted) and (node := await self._usable_node(bundles)) is not None:
                await asyncio.to_thread(self._follow_logs, node)
                return self._engine(place, node, bundles)
            self.give_back(place)

    def give_back(self, place: int, *, failed: bool = False) -> None:
        """Returns the GPUs of a place to Ray, after its engine has ended; `failed` if it did not start."""
        if (bundles := self._held.pop(place, None)) is not None:
            bundles.release()
        if failed:
            self._not_before[place] = time.monotonic() + UNUSABLE_PAUSE_S

    def close(self) -> None:
        """Returns all GPUs, and copies the rest of the logs; takes seconds where a node does not answer."""
        for place in self.places:
            self.give_back(place)
        self._logs.close()

    @property
    def _per_engine(self) -> int:
        return self._args.rollout_num_gpus_per_engine

    async def _reserved(self, bundles: ExtraBundles, wanted: Callable[[], bool]) -> bool:
        """Waits until Ray has reserved the GPUs; false if they are no longer `wanted`."""
        while wanted():
            if await asyncio.to_thread(bundles.wait, LOOK_INTERVAL_S):
                return True
        return False

    async def _usable_node(self, bundles: ExtraBundles) -> str | None:
        """The node of the GPUs; None if it went away, or differs from this one in what nodes must have in common."""
        try:
            node = await bundles.locate()
            await check_node(self._args, node)
            return node
        except (NodesDifferError, RayError) as error:
            message = f"no server joins on GPUs that Ray offers: {error}"
        if message not in self._reported:
            self._reported.add(message)
            logger.warning("%s", message)
        await asyncio.sleep(UNUSABLE_PAUSE_S)
        return None

    def _follow_logs(self, node: str) -> None:
        with self._following:  # of one place after the other
            self._logs.follow([node])
            self._logs.wait()

    def _engine(self, place: int, node: str, bundles: ExtraBundles) -> ElasticEngine:
        life = next(self._lives[place])
        settings = server_settings(self._args, self._first_index + place, self._launch, life)
        return ElasticEngine(settings, [EnginePart(node, tuple(bundles.gpus))], bundles, self._config)
