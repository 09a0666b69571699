"""All servers of a run that get no weight updates: the reward model or teachers, and the frozen models."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Sequence

from slimrl.arguments import Arguments
from slimrl.cluster.engines.engine import Engine
from slimrl.cluster.engines.frozen_models import FrozenModels
from slimrl.cluster.engines.reward_server import RewardServers
from slimrl.cluster.launch import Launch
from slimrl.cluster.placement import GpuBundles


@dataclasses.dataclass
class OtherServers:
    """The rollout manager's servers besides the policy's engines; each part may be empty."""

    reward: RewardServers = dataclasses.field(default_factory=lambda: RewardServers([]))
    frozen: FrozenModels = dataclasses.field(default_factory=FrozenModels)

    @classmethod
    async def start(
        cls, args: Arguments, gpus: GpuBundles, launch: Launch, policy: Awaitable[None] | None = None
    ) -> OtherServers:
        """Starts both parts at once; on shared GPUs after the engines of the `policy`."""
        reward = RewardServers.start(args, gpus, launch, policy)
        return cls(*await asyncio.gather(reward, FrozenModels.start(args, gpus, launch, policy)))

    @property
    def engines(self) -> list[Engine]:
        """All servers."""
        return [*self.reward.engines, *self.frozen.engines]

    def reachable(self, args: Arguments) -> Arguments:
        """`args` with the addresses of the servers and routers; it already has that of the policy's router."""
        return self.frozen.reachable(self.reward.reachable(args))

    async def watch(self, policy: Awaitable[str]) -> str:
        """The result of `policy`, or the message of the first death of another server or router."""
        return await self.frozen.watch(self.reward.watch(policy))

    async def memory(self) -> dict[str, float]:
        """Resident memory of every server and router in GiB, by name."""
        return await self.reward.memory() | await self.frozen.memory()

    async def release_memory(self) -> None:
        """Releases the memory of those on shared GPUs."""
        await asyncio.to_thread(self.reward.gpu_memory.release)
        await self.frozen.release_memory()

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Reallocates their memory of `tags`."""
        await asyncio.to_thread(self.reward.gpu_memory.resume, tags)
        await self.frozen.resume_memory(tags)

    async def close(self) -> None:
        """Ends all of them."""
        await asyncio.gather(self.reward.close(), self.frozen.close())
