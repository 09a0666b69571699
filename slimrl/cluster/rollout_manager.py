"""The Ray actor that owns the data source and the engines, and generates training batches from prompts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray

from slimrl.algorithms.estimators import RunningMoments
from slimrl.arguments import Arguments
from slimrl.cluster import ray_session
from slimrl.cluster.engines.elastic_engines import ElasticEngines
from slimrl.cluster.engines.engine_group import EngineGroup
from slimrl.cluster.engines.engine_recovery import RETRY_TIMEOUT_S, EngineRecovery
from slimrl.cluster.engines.health_monitor import EngineGroupStatus, HealthConfig, RecoveryEvents, states_of
from slimrl.cluster.engines.other_servers import OtherServers, RunRecovery
from slimrl.cluster.launch import ActorSetup, Launch, key_of
from slimrl.cluster.placement import GpuBundles
from slimrl.cluster.watchdog import RolloutStatus
from slimrl.engines.backend import backend
from slimrl.engines.protocol import RETRY_TIMEOUT_S as RETRY_TIMEOUT_WITHOUT_RECOVERY_S
from slimrl.engines.protocol import EngineGroupClient
from slimrl.engines.server_protocol import EngineMemory
from slimrl.hooks import contain_tasks
from slimrl.observability.rollout_dump import RolloutDumps
from slimrl.observability.tracer import Timeline
from slimrl.processes.process_info import resident_gib
from slimrl.rollout import async_utils
from slimrl.rollout.async_rollout import staleness_metrics
from slimrl.rollout.dataset.data_source import open_data_source, recorded_groups
from slimrl.rollout.dataset.tokenizer import load_tokenizer
from slimrl.rollout.generation import inflight_groups
from slimrl.rollout.generation.sample_tracker import LoopMonitor, SampleTrace
from slimrl.rollout.metrics import EvaluationReport, RolloutMetricsConfig, rollout_metrics
from slimrl.rollout.rm_hub.scorer import check_failure_rate
from slimrl.rollout.rollout_function import (
    CustomRollout,
    ExpectedOutput,
    RolloutOutput,
    reported_metrics,
    reported_scalars,
    rollout_without_engines,
)
from slimrl.rollout.rollout_generator import RolloutGenerator
from slimrl.weights.update.topology import EngineEndpoint

if TYPE_CHECKING:
    from slimrl.engines.server_protocol import ExternalRouter

LOADS_TIMEOUT_S = 2.0
LOOP_INTERVAL_S = 1.0
COLLECT_AFTER_S = 0.02  # the result is on its way, and nothing refers to its samples any more


@dataclasses.dataclass(frozen=True)
class RolloutResult:
    """One finished rollout: its batches and its metrics.

    `batches` has one list per group of training ranks, in the order of `data_parallel_sizes`: the policy's and, if the
    critic has GPUs of its own, the critic's. A list has a pickled batch in Ray's object store per data-parallel rank.
    `data_state` is the data source's state right after this rollout's prompts were sampled: a checkpoint with it
    resumes at the next prompt, however many rollouts were generated ahead. None if no checkpoint follows.
    """

    rollout_id: int
    batches: list[list[ray.ObjectRef]]
    metrics: dict[str, float]
    data_state: dict[str, Any] | None
    weight_version: str
    seconds: float


def _tokenizer_and_data(args: Arguments) -> tuple[Any, Any]:
    import slimrl.rollout.convert_samples  # noqa: F401 - torch: not before the servers start, nor in the driver

    tokenizer = load_tokenizer(args.hf_checkpoint, trust_code=args.trusts_remote_code)
    if args.dump_details is not None:
        tokenizer.save_pretrained(Path(args.dump_details) / "tokenizer")
    return tokenizer, open_data_source(args, tokenizer)


@ray.remote(num_cpus=0, concurrency_groups={"watchdog": 6})
class RolloutManager:
    """An asyncio actor: `watch` stays pending while `generate` runs, which may overlap with training.

    Status calls of the driver run in a separate event loop (concurrency group "watchdog"): they are answered even if a
    custom function blocks the main one.
    """

    def __init__(self, args: Arguments, data_parallel_sizes: Sequence[int], log_path: Path, setup: ActorSetup) -> None:
        setup.enter()
        ray_session.redirect_to(log_path, args.log_level)
        self._args = args
        self._timeline = Timeline.open(args, "rollout manager")
        self._timeline.add_process_start()
        self._dumps = RolloutDumps(args.save_debug_rollout_data, args.save_debug_rollout_limit)
        self._data_parallel_sizes = data_parallel_sizes
        self._engines: EngineGroup | None = None
        self._others = OtherServers()
        self._recovery: EngineRecovery | None = None
        self._client: EngineGroupClient | None = None
        self._generator: RolloutGenerator | None = None
        self._memory = EngineMemory([])
        self._loop: LoopMonitor | None = None
        self._phase = ""
        self._log_path = log_path
        self._opening = asyncio.Lock()
        self._tokenizer: Any = None
        self._data_source: Any = None
        self._moments = RunningMoments()  # of the rewards

    async def start(self, gpus: GpuBundles | None, launch: Launch) -> list[EngineEndpoint]:
        """Starts the engines and returns their endpoints; none if `gpus` is None (replay of recorded rollouts)."""
        self._loop = LoopMonitor()
        contain_tasks(asyncio.get_running_loop())
        if gpus is None:
            await self._open_data()
            return []
        self._phase = "starting the servers (logs: sglang*.log and router.log next to this log)"
        engines = asyncio.ensure_future(self._start_engines(gpus, launch))
        others = OtherServers.start(self._args, gpus, launch, engines)
        with self._timeline.span("start of the servers"):
            _, self._others, _ = await asyncio.gather(engines, others, self._open_data())
        self._args = self._others.reachable(self._engines.reachable(self._args))
        per_server, trained = self._args.sglang_server_concurrency, not self._args.debug_rollout_only
        self._client = backend(self._args.rollout_engine).client(
            self._engines.router_url,
            [endpoint.url for endpoint in self._engines.endpoints],
            concurrency=per_server * len(self._engines.endpoints),
            request_timeout_s=self._args.sglang_router_request_timeout_secs,
            retry_timeout_s=RETRY_TIMEOUT_S if self._args.use_fault_tolerance else RETRY_TIMEOUT_WITHOUT_RECOVERY_S,
            weights_are_updated=trained,
            key=key_of(self._args),
            vocabulary=self._args.vocab_size,
            adapter=self._args.adapter_of_requests,
            routing=self._args.routing_shape,
        )
        await self._client.__aenter__()
        self._memory = EngineMemory([engine.control() for engine in self._engines.engines])
        if self._args.use_fault_tolerance:
            parts = HealthConfig.from_args(self._args), self._engines, self._client, self._memory, self._others
            elastic = ElasticEngines.from_args(self._args, gpus.plan, launch)
            self._recovery = RunRecovery(*parts, needs_weight_sync=trained, concurrency=per_server, elastic=elastic)
        self._generator = RolloutGenerator.from_args(
            self._args, self._tokenizer, self._client, SampleTrace(self._timeline, self._args.timeline_requests)
        )
        self._others.reward.when_moved = self._generator.move_reward_server
        if self._args.max_weight_staleness is not None and not self._args.eval_only:
            self._generator.start_async(self._data_source, lambda: self._client.concurrency)  # follows the servers
        self._phase = ""
        return self._engines.endpoints

    async def _start_engines(self, gpus: GpuBundles, launch: Launch) -> None:
        self._engines = await EngineGroup.start(self._args, gpus, launch, self._timeline)

    async def _open_data(self) -> None:
        """Loads the tokenizer and opens the data source, once."""
        async with self._opening:
            if self._data_source is None:
                self._tokenizer, self._data_source = await asyncio.to_thread(_tokenizer_and_data, self._args)
                async_utils.expect_many_samples()  # now that the modules of torch and transformers are loaded

    async def watch(self) -> str:
        """Pending while the engines live; then the message of the first death that cannot be recovered from."""
        return await self._others.watch((self._engines if self._recovery is None else self._recovery).watch())

    @ray.method(concurrency_group="watchdog")
    async def watch_loop(self) -> str:
        """Pending while the event loop that calls custom functions runs; then the reason that it ended."""
        while (loop := self._loop) is None:
            await asyncio.sleep(LOOP_INTERVAL_S)
        return await loop.ended()

    async def engine_events(self, serial: int) -> RecoveryEvents:
        """`EngineRecovery.events`; this and the four calls below need `--use-fault-tolerance`."""
        return await self._recovery.events(serial)

    async def engine_status(self) -> EngineGroupStatus:
        """`EngineRecovery.status`."""
        return await self._recovery.status()

    async def begin_weight_update(self, only_waiting: bool) -> list[EngineEndpoint]:
        """`EngineRecovery.begin_weight_update`."""
        return await self._recovery.begin_weight_update(only_waiting)

    async def end_weight_update(self, urls: list[str], version: str) -> None:
        """`EngineRecovery.end_weight_update`."""
        await self._recovery.end_weight_update(urls, version)

    async def weight_update_failed(self, urls: list[str]) -> list[str]:
        """`EngineRecovery.weight_update_failed`."""
        return await self._recovery.weight_update_failed(urls)

    async def release_memory(self) -> None:
        """Releases the GPU memory of every server on shared GPUs; no request may be running."""
        await self._others.release_memory()
        await (asyncio.to_thread(self._memory.release) if self._recovery is None else self._recovery.release_memory())

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Reallocates the memory of `tags` on these servers."""
        await self._others.resume_memory(tags)
        recovery = self._recovery
        await (asyncio.to_thread(self._memory.resume, tags) if recovery is None else recovery.resume_memory(tags))

    async def address(self) -> str:
        """The address of this machine, which also runs the router."""
        return ray.util.get_node_ip_address()

    async def prompts_per_epoch(self) -> int:
        """Number of prompts in the training data set; may be called before `start`."""
        await self._open_data()
        return len(self._data_source)

    async def load_data_state(self, state: dict[str, Any]) -> None:
        """Restores the data source from a checkpoint's state."""
        stream = self._generator.continuous if self._generator is not None else None
        state = self._moments.restored(state)
        finished = inflight_groups.restore(self._data_source, state, keeps_finished=stream is not None)
        if stream is not None:
            stream.restore(finished)

    async def drain(self) -> None:
        """Waits until no group is in flight; none starts until `set_weight_version` (`--max-weight-staleness`)."""
        await self._generator.continuous.drain()

    async def set_weight_version(self, version: int, end: int) -> None:
        """The servers hold weights `version`: requests use them, and fully asynchronous generation goes on to `end`."""
        if self._client is not None:
            self._client.use_weight_version(str(version))
        if self._generator is not None and self._generator.continuous is not None:
            self._generator.continuous.set_weight_version(version, end)

    @ray.method(concurrency_group="watchdog")
    async def progress(self) -> tuple[int, int]:
        """(finished, expected) samples of the running generation."""
        return self._generator.progress() if self._generator else (0, 0)

    @ray.method(concurrency_group="watchdog")
    async def memory(self) -> dict[str, float]:
        """Resident memory of this process, the router and every server in GiB, by name."""
        own = {"rollout_manager_rss_gib": resident_gib(with_children=False)}
        return own | (await self._engines.memory() if self._engines else {}) | await self._others.memory()

    @ray.method(concurrency_group="watchdog")
    async def finish_dumps(self) -> None:
        """Waits until the dump of the last rollout is written; a failed run calls it instead of `close`."""
        with contextlib.suppress(TypeError):  # it cannot be written, and the run has an error of its own
            await self._dumps.finish()

    @ray.method(concurrency_group="watchdog")
    async def registered(self) -> list[str]:
        """URLs of the servers that this run registered with an external router (`--sglang-router-ip`)."""
        return sorted(cast("ExternalRouter", self._engines.router).added) if self._engines is not None else []

    @ray.method(concurrency_group="watchdog")
    async def server_states(self) -> list[str]:
        """One sentence per server that blocks others, including those of other models."""
        if self._engines is None:
            return []
        return await states_of([*self._engines.engines, *self._others.engines], self._engines.router)

    @ray.method(concurrency_group="watchdog")
    async def status(self) -> RolloutStatus:
        """The current phase, the unfinished samples with their stages, and the load of the servers."""
        finished, expected = await self.progress()
        engines = self._engines.engines if self._client else []
        serving = [engine.control(LOADS_TIMEOUT_S) for engine in engines if engine.url in self._client.server_urls]
        loads = await asyncio.gather(*(asyncio.to_thread(control.load) for control in serving))
        return RolloutStatus(
            doing=self._phase,
            finished=finished,
            expected=expected,
            samples=self._generator.active_samples() if self._generator else [],
            in_flight=self._client.in_flight if self._client else 0,
            blocked_line=await self._loop.blocked_line() if self._loop else "",
            servers=loads,
            log=str(self._log_path),
        )

    async def generate(self, rollout_id: int, saved: bool) -> RolloutResult:
        """Generates (or replays) one rollout and splits it into one batch per data-parallel rank.

        The result has a `data_state` if a checkpoint is `saved` after this rollout.
        """
        self._memory.require(f"generating rollout {rollout_id}")
        await self._dumps.finish()
        if self._recovery is not None:
            self._recovery.generation_begins()
        with self._timeline.span("generate", rollout=rollout_id):
            result = await self._generate(rollout_id, saved)
        fully_async = self._generator is not None and self._generator.continuous is not None
        collect = functools.partial(async_utils.collect_between_rollouts, samples_are_held=fully_async)
        asyncio.get_running_loop().call_later(COLLECT_AFTER_S, collect)  # while the batches train
        return result

    async def _generate(self, rollout_id: int, saved: bool) -> RolloutResult:
        started = time.perf_counter()
        self._timeline.mark("samples")
        if (recorded := self._args.replayed_rollouts) is not None:
            output = RolloutOutput(recorded_groups(self._args, recorded, rollout_id, self._data_source), {})
        elif self._generator is None:
            self._data_source.begin_rollout(rollout_id)
            custom, expected = CustomRollout.for_training(self._args), ExpectedOutput.from_args(self._args)
            output = await rollout_without_engines(custom, expected, rollout_id, self._data_source, self._tokenizer)
        else:
            output = await self._generator.generate_rollout(rollout_id, self._data_source, saved=saved)
        seconds = time.perf_counter() - started if output.seconds is None else output.seconds
        self._timeline.mark("batches")
        groups = output.groups
        data_state = output.data_state or (self._data_source.state_dict() if saved else None)
        samples = [sample for group in groups for sample in group]
        check_failure_rate(samples, self._args.rm_failure_limit, f"rollout {rollout_id}")
        from slimrl.rollout import convert_samples
        from slimrl.rollout.convert_samples import RewardProcessing, compute_rewards, remove_truncated

        remove_truncated(samples, asked=self._args.mask_truncated_samples)
        rewards = compute_rewards(RewardProcessing.from_args(self._args), samples, self._moments)
        metrics = rollout_metrics(RolloutMetricsConfig.from_args(self._args), samples, rewards.raw.tolist(), seconds)
        metrics |= {} if self._client is None else self._client.requests.take(len(samples))
        metrics |= staleness_metrics(rollout_id, samples) | self._moments.metrics(reported=self._args.normalize_reward)
        metrics |= {**output.metrics, **await self._fault_metrics()}
        keys = [self._args.reward_key] * len(samples)
        dump = functools.partial(self._dumps.start, rollout_id, samples, metrics, keys)
        own = self._args.custom_convert_samples_to_train_data_path or self._args.custom_rollout_log_function_path
        if own is not None:  # it may change the samples
            dump()
            await self._dumps.finish()
        try:
            routing = self._args.routing_shape
            batch = convert_samples.training_batch(self._args, samples, rewards, hook_args=self._args, routing=routing)
            schedule = convert_samples.BatchSchedule.from_args(self._args)
            batches = schedule.stored(batch, self._data_parallel_sizes, ray.put)
            versions = {version for sample in samples for version in sample.weight_versions}
            versions |= {version for sample in samples for version, _ in sample.version_spans if version}
            reported = reported_metrics(
                self._args, rollout_id, samples, metrics, output.metrics, seconds, hook_args=self._args
            )
        finally:
            if own is None:
                dump()  # while the batches train; it also shows samples that cannot be trained on
        return RolloutResult(
            rollout_id=rollout_id,
            batches=batches,
            metrics=reported,
            data_state=None if data_state is None else self._moments.added_to(data_state),
            weight_version=",".join(sorted(versions, key=lambda version: (len(version), version))),
            seconds=time.perf_counter() - started,
        )

    async def _fault_metrics(self) -> dict[str, float]:
        """Counts of lost and replaced servers since the previous rollout."""
        if self._recovery is None:
            return {}
        await self._recovery.generation_ends()
        return self._recovery.take_metrics()

    async def evaluate(self, rollout_id: int) -> dict[str, EvaluationReport]:
        """Evaluates every data set, dumps the samples and returns the reports."""
        self._memory.require("an evaluation")
        await self._dumps.finish()
        span = self._timeline.span("evaluate", track="evaluations", rollout=rollout_id)
        with span, self._client.requests.apart():  # not counted as rollout requests
            results = await self._generator.evaluate(rollout_id)
        samples = [sample for result in results.values() for sample in result.samples]
        metrics = {name: value for result in results.values() for name, value in result.metrics().items()}
        keys = {dataset.name: dataset.reward_key for dataset in self._args.eval_datasets}
        of_samples = [keys.get(name) for name, result in results.items() for _ in result.samples]
        self._dumps.start(rollout_id, samples, metrics, of_samples, evaluation=True)
        await self._dumps.finish()
        scalars = reported_scalars(self._args, rollout_id, results, hook_args=self._args)
        return {name: EvaluationReport(result.mean_reward, scalars[name]) for name, result in results.items()}

    async def close(self) -> None:
        """Closes the client, the router and the servers."""
        try:
            if self._generator is not None:
                await self._generator.end()
            if self._recovery is not None:
                await self._recovery.close()
            if self._client is not None:
                await self._client.close()
            if self._engines is not None:
                await self._engines.close()
            await self._others.close()
            self._timeline.close()
        finally:
            await self._dumps.finish()
