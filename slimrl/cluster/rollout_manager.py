"""The Ray actor that owns the data source and the inference fleet, and turns prompts into training batches."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray

from slimrl.arguments import Arguments
from slimrl.cluster import ray_session
from slimrl.cluster.engines.engine_group import EngineGroup
from slimrl.cluster.engines.engine_recovery import KEEP_TRYING_S, EngineRecovery
from slimrl.cluster.engines.health_monitor import HealthConfig, states_of
from slimrl.cluster.engines.reward_server import RewardServers
from slimrl.cluster.launch import Launch
from slimrl.cluster.placement import GpuBundles
from slimrl.cluster.watchdog import RolloutStatus
from slimrl.data.sample import Sample
from slimrl.data.train_batch import schedule_batch
from slimrl.engines.auth import key_of
from slimrl.engines.sglang.client import KEEP_TRYING_S as KEEP_TRYING_WITHOUT_RECOVERY_S
from slimrl.engines.sglang.client import RouterClient
from slimrl.engines.sglang.control import ServerControl, load_of
from slimrl.engines.sglang.engine_memory import EngineMemory
from slimrl.hooks import contain_tasks
from slimrl.observability import rollout_dump
from slimrl.observability.tracer import Timeline
from slimrl.processes.best_effort_files import OptionalFiles
from slimrl.processes.process_info import resident_gib
from slimrl.rollout import async_utils
from slimrl.rollout.asynchronous import inflight_state
from slimrl.rollout.asynchronous.staleness import staleness_metrics
from slimrl.rollout.convert_samples import compute_rewards, training_batch
from slimrl.rollout.dataset.custom_data_source import open_data_source, recorded_groups
from slimrl.rollout.generation.sample_tracker import LoopMonitor, SampleTrace
from slimrl.rollout.rm_hub.scorer import require_verdicts
from slimrl.rollout.rollout_function import RolloutOutput, reported_metrics, reported_scalars, rollout_without_engines
from slimrl.rollout.rollout_generator import RolloutGenerator
from slimrl.rollout.rollout_metrics import all_metrics

if TYPE_CHECKING:
    from slimrl.engines.sglang.router import ExternalRouter

LOADS_TIMEOUT_S = 2.0
LOOP_INTERVAL_S = 1.0


@dataclasses.dataclass(frozen=True)
class RolloutResult:
    """One finished rollout: a pickled batch per data-parallel rank in Ray's object store, and what is known about it.

    `data_state` is the data source right after this rollout's prompts were sampled: a checkpoint with it
    resumes at the next prompt, however many rollouts were generated ahead. None where nothing is saved.
    """

    rollout_id: int
    batches: list[ray.ObjectRef]
    metrics: dict[str, float]
    data_state: dict[str, Any] | None
    weight_version: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """One data set's numbers, without its samples."""

    mean_reward: float
    scalars: dict[str, float]

    def metrics(self) -> dict[str, float]:
        """Scalars under their full names, `eval/...`."""
        return self.scalars


def load_tokenizer(path: str, *, trust_code: bool) -> Any:
    """The tokenizer of an HF checkpoint folder; runs code from it only with `trust_code`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_code)


def _tokenizer_and_data(args: Arguments) -> tuple[Any, Any]:
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_code=bool(args.sglang_options.get("trust_remote_code")))
    if args.dump_details is not None:
        tokenizer.save_pretrained(Path(args.dump_details) / "tokenizer")
    return tokenizer, open_data_source(args, tokenizer)


@ray.remote(num_cpus=0, concurrency_groups={"watchdog": 6})
class RolloutManager:
    """An asyncio actor: `watch` stays pending beside a running `generate`, which may overlap with training.

    What the driver asks meanwhile is answered in an event loop of its own, also where a function blocks the first.
    """

    def __init__(self, args: Arguments, data_parallel_size: int, log_path: Path, folder: Path) -> None:
        ray_session.enter(folder)
        ray_session.redirect_to(log_path, args.log_level)
        self._args = args
        self._timeline = Timeline.open(args, "rollout manager")
        self._dumps = OptionalFiles(f"the rollout dump {args.save_debug_rollout_data}")
        self._data_parallel_size = data_parallel_size
        self._fleet: EngineGroup | None = None
        self._reward_servers = RewardServers([])
        self._recovery: EngineRecovery | None = None
        self._client: RouterClient | None = None
        self._generator: RolloutGenerator | None = None
        self._memory = EngineMemory([])
        self._loop: LoopMonitor | None = None
        self._phase = ""
        self._log_path = log_path
        self._opening = asyncio.Lock()
        self._tokenizer: Any = None
        self._data_source: Any = None

    async def start(self, gpus: GpuBundles | None, launch: Launch) -> list[Any]:
        """Starts the fleet (none where `gpus` is None: replay of recorded rollouts); returns the endpoints."""
        async_utils.expect_many_samples()
        self._loop = LoopMonitor()
        contain_tasks(asyncio.get_running_loop())
        if gpus is None:
            await self._open_data()
            return []
        self._phase = "starting the servers (sglang*.log and router.log beside this log)"
        fleet = self._start_fleet(gpus, launch)
        judges = RewardServers.start(self._args, gpus, launch)
        with self._timeline.span("start of the servers"):
            # together: each takes seconds
            _, self._reward_servers, _ = await asyncio.gather(fleet, judges, self._open_data())
        self._args = self._fleet.reachable(self._reward_servers.reachable(self._args))
        key = key_of(self._args)
        self._client = RouterClient(
            self._fleet.router_url,
            [endpoint.url for endpoint in self._fleet.endpoints],
            concurrency=self._args.sglang_server_concurrency * len(self._fleet.endpoints),
            request_timeout_s=self._args.sglang_router_request_timeout_secs,
            keep_trying_s=KEEP_TRYING_S if self._args.use_fault_tolerance else KEEP_TRYING_WITHOUT_RECOVERY_S,
            weights_are_updated=not self._args.debug_rollout_only,
            key=key,
            vocabulary=self._args.vocab_size,
        )
        await self._client.__aenter__()
        self._memory = EngineMemory([ServerControl(endpoint.url, key=key) for endpoint in self._fleet.endpoints])
        if self._args.use_fault_tolerance:
            flags, trained = HealthConfig.from_args(self._args), not self._args.debug_rollout_only
            self._recovery = EngineRecovery(
                flags, self._fleet, self._client, self._memory, weights_come=trained, key=key
            )
        self._generator = RolloutGenerator(
            self._args, self._tokenizer, self._client, SampleTrace(self._timeline, self._args.timeline_requests)
        )
        if self._args.max_weight_staleness is not None and not self._args.only_evaluates:
            requests = self._args.sglang_server_concurrency * len(self._fleet.endpoints)
            self._generator.generate_on(self._data_source, requests)
        self._phase = ""
        return self._fleet.endpoints

    async def _start_fleet(self, gpus: GpuBundles, launch: Launch) -> None:
        self._fleet = await EngineGroup.start(self._args, gpus, launch)

    async def _open_data(self) -> None:
        """Loads the tokenizer and opens the data source, once."""
        async with self._opening:
            if self._data_source is None:
                self._tokenizer, self._data_source = await asyncio.to_thread(_tokenizer_and_data, self._args)

    async def watch(self) -> str:
        """Pending while the fleet lives; then the message of the first death that cannot be made good."""
        return await self._reward_servers.watch((self._fleet if self._recovery is None else self._recovery).watch())

    @ray.method(concurrency_group="watchdog")
    async def watch_loop(self) -> str:
        """Pending while the event loop runs in which functions of the user's are called; then what ended it."""
        while (loop := self._loop) is None:
            await asyncio.sleep(LOOP_INTERVAL_S)
        return await loop.ended()

    async def recover(self, method: str, *arguments: Any) -> Any:
        """Calls a method of `EngineRecovery` (`--use-fault-tolerance`)."""
        return await getattr(self._recovery, method)(*arguments)

    async def release_memory(self) -> None:
        """Takes the memory of every server; no request may run."""
        await (asyncio.to_thread(self._memory.release) if self._recovery is None else self._recovery.release_memory())

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Gives every server the memory of `tags` again."""
        if self._recovery is not None:
            await self._recovery.resume_memory(tags)
            return
        await asyncio.to_thread(self._memory.resume, tags)

    async def address(self) -> str:
        """Of this machine, on which the router runs too."""
        return ray.util.get_node_ip_address()

    async def prompts_per_epoch(self) -> int:
        """Number of prompts in the training data set; may be asked before `start`."""
        await self._open_data()
        return len(self._data_source)

    async def load_data_state(self, state: dict[str, Any]) -> None:
        """Continues the data source where a checkpoint left it."""
        stream = self._generator.continuous if self._generator is not None else None
        finished = inflight_state.restore(self._data_source, state, keeps_finished=stream is not None)
        if stream is not None:
            stream.restore(finished)

    async def drain(self) -> None:
        """Returns when no group is in flight, and begins none until `set_weight_version`
        (`--max-weight-staleness`).
        """
        await self._generator.continuous.drain()

    async def set_weight_version(self, version: int, end: int) -> None:
        """The servers hold weights `version`; fully asynchronous generation begins or continues, up to rollout
        `end`.
        """
        if self._generator is not None and self._generator.continuous is not None:
            self._generator.continuous.set_weight_version(version, end)

    @ray.method(concurrency_group="watchdog")
    async def progress(self) -> tuple[int, int]:
        """Finished and expected samples of the generation that runs now."""
        return self._generator.progress() if self._generator else (0, 0)

    @ray.method(concurrency_group="watchdog")
    async def memory(self) -> dict[str, float]:
        """Resident memory of this process, the router and every server, GiB by name."""
        own = {"rollout_manager_rss_gib": resident_gib(with_children=False)}
        return own | (await self._fleet.memory() if self._fleet else {}) | await self._reward_servers.memory()

    @ray.method(concurrency_group="watchdog")
    async def registered(self) -> list[str]:
        """The servers that this run put behind a router of the user's (`--sglang-router-ip`)."""
        return sorted(cast("ExternalRouter", self._fleet.router).added) if self._fleet is not None else []

    @ray.method(concurrency_group="watchdog")
    async def server_states(self) -> list[str]:
        """A sentence for each server that keeps others waiting, those of the reward model too."""
        if self._fleet is None:
            return []
        return await states_of([*self._fleet.engines, *self._reward_servers.engines], self._fleet.router.pid)

    @ray.method(concurrency_group="watchdog")
    async def where(self) -> RolloutStatus:
        """What is being done, which samples are unfinished and what keeps them, and how busy the servers are."""
        finished, expected = await self.progress()
        urls = self._client.server_urls if self._client else []
        loads = await asyncio.gather(
            *(asyncio.to_thread(load_of, url, LOADS_TIMEOUT_S, key_of(self._args)) for url in urls)
        )
        return RolloutStatus(
            doing=self._phase,
            finished=finished,
            expected=expected,
            samples=self._generator.under_way() if self._generator else [],
            in_flight=self._client.in_flight if self._client else 0,
            blocked_line=await self._loop.blocked_line() if self._loop else "",
            servers=loads,
            log=str(self._log_path),
        )

    async def generate(self, rollout_id: int, saved: bool) -> RolloutResult:
        """Generates (or replays) one rollout and cuts it into one batch per data-parallel rank.

        There is a `data_state` where a checkpoint is `saved` after this rollout.
        """
        self._memory.require(f"generating rollout {rollout_id}")
        endless = self._generator is not None and self._generator.continuous is not None
        async_utils.collect_between_rollouts(samples_are_held=endless)
        if self._recovery is not None:
            self._recovery.generation_begins()
        with self._timeline.span("generate", rollout=rollout_id):
            return await self._generate(rollout_id, saved)

    async def _generate(self, rollout_id: int, saved: bool) -> RolloutResult:
        started = time.perf_counter()
        self._timeline.mark("samples")
        if (recorded := self._args.replayed_rollouts) is not None:
            output = RolloutOutput(recorded_groups(self._args, recorded, rollout_id, self._data_source), {})
        elif self._generator is None:
            self._data_source.begin_rollout(rollout_id)
            output = await rollout_without_engines(self._args, rollout_id, self._data_source, self._tokenizer)
        else:
            output = await self._generator.generate_rollout(rollout_id, self._data_source, saved=saved)
        seconds = time.perf_counter() - started if output.seconds is None else output.seconds
        self._timeline.mark("batches")
        groups = output.groups
        data_state = output.data_state or (self._data_source.state_dict() if saved else None)
        samples = [sample for group in groups for sample in group]
        require_verdicts(samples, self._args.rm_failure_limit, f"rollout {rollout_id}")
        rewards = compute_rewards(self._args, samples)
        metrics = all_metrics(self._args, samples, rewards.raw.tolist(), seconds) | self._request_metrics(len(samples))
        metrics |= {**staleness_metrics(rollout_id, samples), **output.metrics, **await self._faults()}
        await asyncio.to_thread(self._dump, rollout_id, samples, metrics, [self._args.reward_key] * len(samples))
        shares = self._schedule(training_batch(self._args, samples, rewards))
        versions = {version for sample in samples for version in sample.weight_versions}
        versions |= {version for sample in samples for version, _ in sample.version_spans if version}
        return RolloutResult(
            rollout_id=rollout_id,
            batches=[ray.put(pickle.dumps(share)) for share in shares],
            metrics=reported_metrics(self._args, rollout_id, samples, metrics, output.metrics, seconds),
            data_state=data_state,
            weight_version=",".join(sorted(versions, key=lambda version: (len(version), version))),
            seconds=time.perf_counter() - started,
        )

    def _request_metrics(self, samples: int) -> dict[str, float]:
        """What the servers said about the requests since the rollout before."""
        return {} if self._client is None else self._client.requests.take(samples)

    async def _faults(self) -> dict[str, float]:
        """What was replaced since the rollout before."""
        if self._recovery is None:
            return {}
        await self._recovery.generation_ends()
        return self._recovery.take_metrics()

    def _schedule(self, batch: Any) -> list[Any]:
        args = self._args
        return schedule_batch(
            batch,
            data_parallel_size=self._data_parallel_size,
            context_parallel_size=args.context_parallel_size,
            micro_batch_group=args.microbatch_group_size_per_vp_stage or 1,
            global_batch_size=args.global_batch_size,
            micro_batch_size=args.micro_batch_size,
            max_tokens_per_micro_batch=args.max_tokens_per_gpu if args.use_dynamic_batch_size else None,
            balance=args.balance_data,
        )

    async def evaluate(self, rollout_id: int) -> dict[str, EvaluationReport]:
        """Evaluates every data set; the samples are dumped, their numbers returned."""
        self._memory.require("an evaluation")
        span = self._timeline.span("evaluate", track="evaluations", rollout=rollout_id)
        with span, self._client.requests.apart():  # its requests are no rollout's
            results = await self._generator.evaluate(rollout_id)
        samples = [sample for result in results.values() for sample in result.samples]
        metrics = {name: value for result in results.values() for name, value in result.metrics().items()}
        keys = {dataset.name: dataset.reward_key for dataset in self._args.eval_datasets}
        of_samples = [keys.get(name) for name, result in results.items() for _ in result.samples]
        await asyncio.to_thread(self._dump, rollout_id, samples, metrics, of_samples, evaluation=True)
        scalars = reported_scalars(self._args, rollout_id, results)
        return {name: EvaluationReport(result.mean_reward, scalars[name]) for name, result in results.items()}

    def _dump(
        self,
        rollout_id: int,
        samples: list[Sample],
        metrics: dict[str, float],
        reward_keys: Sequence[str | None],
        *,
        evaluation: bool = False,
    ) -> None:
        template = self._args.save_debug_rollout_data
        if template:
            write = functools.partial(rollout_dump.save_rollout, template, rollout_id, samples, metrics=metrics)
            limit = self._args.save_debug_rollout_limit
            self._dumps.attempt(lambda: write(evaluation=evaluation, reward_keys=reward_keys, limit=limit))

    async def close(self) -> None:
        """Ends the client, the router and the servers."""
        if self._generator is not None:
            await self._generator.end()
        if self._recovery is not None:
            await self._recovery.close()
        if self._client is not None:
            await self._client.close()
        if self._fleet is not None:
            await self._fleet.close()
        await self._reward_servers.close()
        self._timeline.close()
