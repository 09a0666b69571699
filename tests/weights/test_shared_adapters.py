"""Two runs update LoRA adapters in two real servers, each behind a router of its own, and neither sees the other.

Log-probabilities are compared with transformers in float64, with W + alpha / rank * B A of the version in question.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from slimrl.arguments import Arguments
from slimrl.cluster.rollout_manager_proxy import RolloutManagerCleanup
from slimrl.engines.http import KEY_OPTION, call
from slimrl.engines.protocol import EngineError, EngineRequestError, Generation
from slimrl.engines.sglang.adapters import ABORT_PATH, COUNTS_PATH
from slimrl.engines.sglang.client import RouterClient
from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.external_server_check import inspect
from slimrl.engines.sglang.router import RouterProcess
from slimrl.engines.sglang.server import ServerProcess
from slimrl.engines.shared_adapters import remove_adapters
from slimrl.models.adapters import CONFIG_NAME, TARGETS, WEIGHTS_NAME, AdapterConfig, SharedAdapter, peft_config
from slimrl.observability.tracer import Timeline
from slimrl.platform.collective_errors import RankSync
from slimrl.weights.update.adapter_updater import AdapterTransport, SharedAdapterCalls
from slimrl.weights.update.buckets import iter_buckets
from slimrl.weights.update.engine_fanout import WeightSyncError
from tests.megatron.tiny import save_qwen3
from tests.weights.real_servers import running

pytestmark = pytest.mark.slow
CONFIG = AdapterConfig(rank=4, alpha=8.0, targets=TARGETS)  # of run a, and of run b another
SMALLER = AdapterConfig(rank=2, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))
PROMPT = [5, 17, 90, 3]
KEY = "key-of-the-fleet"
RUNNING = 4  # requests at a time in a server; others wait
OPTIONS = {
    "max_total_tokens": 4096,
    "max_running_requests": RUNNING,
    "enable_lora": True,
    "max_lora_rank": 4,
    "lora_target_modules": list(TARGETS),
    "max_loras_per_batch": 3,
    "skip_tokenizer_init": True,
}
Tensors = dict[str, torch.Tensor]


class Model(NamedTuple):
    """Adapters on the base."""

    tensors: Tensors
    scale: float


BASE = Model({}, 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("model") / "base", seed=0)


@pytest.fixture(scope="module")
def hub() -> Iterator[socket.socket]:
    """In the place of the Hugging Face Hub: it never answers, as behind a firewall."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        yield silent


@pytest.fixture(scope="module")
def fleet(folder: Path, hub: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerControl]]:
    """Two servers, which their owner has started."""
    logs = tmp_path_factory.mktemp("logs")
    started = [ServerProcess(folder, log_path=logs / f"{n}.log", options=OPTIONS, key=KEY) for n in range(2)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        with running(started) as urls:
            yield [ServerControl(url, timeout_s=30, key=KEY) for url in urls]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankSync]:
    """The only training rank."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield RankSync(0, WeightSyncError)
    dist.destroy_process_group()


class Run:
    """What a run does with the fleet: updates of its adapter, and requests through its own router."""

    def __init__(self, adapter: SharedAdapter, fleet: list[ServerControl], ranks: RankSync, folder: Path) -> None:
        self.adapter = adapter
        self.fleet, self._folder = fleet, folder
        self._calls = SharedAdapterCalls(fleet, self.adapter, 0, ranks, Timeline.off())
        self.models: dict[str, Model] = {}  # by version
        self.client: RouterClient

    def update(self, version: str, seed: int) -> None:
        """A weight update as the trainer makes it, then the report to the client."""
        tensors = random_adapters(self._folder, seed, self.adapter.config)
        self.models[version] = Model(tensors, self.adapter.config.scale)
        self._calls.begin("abort")
        transport = AdapterTransport(
            self.fleet, [1] * len(self.fleet), peft_config(self.adapter.config), torch.device("cpu")
        )
        transport.with_checksums, transport.name = True, self.adapter.at(version)
        transport.waits_for_requests = True
        for bucket in iter_buckets(tensors.items(), 4096, transport.buffer):
            transport.start(bucket)
        assert self._calls.commit_and_resume(version, "abort") is None
        self.client.use_weight_version(version)

    def loaded(self) -> list[list[str]]:
        """The versions of this run that each server has."""
        names = [server.adapter_requests() for server in self.fleet]
        return [
            sorted(name.removeprefix(self.adapter.prefix) for name in of_server if self.owns(name))
            for of_server in names
        ]

    def owns(self, name: str) -> bool:
        return name.startswith(self.adapter.prefix)

    def requests(self) -> int:
        """Requests that use an adapter of this run, on all servers."""
        counts = [server.adapter_requests() for server in self.fleet]
        return sum(count for of_server in counts for name, count in of_server.items() if self.owns(name))

    async def generate(self, tokens: int, first: int = 5) -> Generation:
        params = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        return await self.client.generate([first, *PROMPT], params)


@dataclasses.dataclass
class Pair:
    a: Run
    b: Run


@contextlib.asynccontextmanager
async def two_runs(fleet, ranks, folder, routers):
    """Runs with fresh adapters, both at version 0, which leave the fleet at the end."""
    adapters = SharedAdapter("a", "11111111", CONFIG), SharedAdapter("b", "22222222", SMALLER)
    runs = [Run(adapter, fleet, ranks, folder) for adapter in adapters]
    urls = [server.url for server in fleet]
    async with contextlib.AsyncExitStack() as stack:
        for number, (run, router) in enumerate(zip(runs, routers, strict=True)):
            client = RouterClient(router.url, urls, concurrency=32, request_timeout_s=60, key=KEY, adapter=run.adapter)
            run.client = await stack.enter_async_context(client)
            await asyncio.to_thread(run.update, "0", 10 * number)
        yield Pair(*runs)
    for run in runs:
        for server in fleet:
            await asyncio.to_thread(remove_adapters, server, run.adapter)
    assert all(server.adapter_requests() == {} for server in fleet)


@pytest.fixture(scope="module")
def routers(fleet, tmp_path_factory) -> Iterator[list[RouterProcess]]:
    """One for each run."""
    logs = tmp_path_factory.mktemp("routers")
    with contextlib.ExitStack() as stack:
        started = [RouterProcess(log_path=logs / f"{number}.log", key=KEY) for number in range(2)]
        for router in started:
            stack.callback(router.stop)
            router.start()
        for router in started:
            router.wait_alive(60)
            router.add_workers([server.url for server in fleet])
            router.wait_ready(len(fleet), 60)
        yield started


def random_adapters(folder: Path, seed: int, config: AdapterConfig) -> Tensors:
    """A and B of every target, by PEFT's names."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, weight in AutoModelForCausalLM.from_pretrained(folder).named_parameters():
        module = name.removesuffix(".weight")
        if module.split(".")[-1] in config.targets:
            outputs, inputs = weight.shape
            found[f"base_model.model.{module}.lora_A.weight"] = 0.2 * torch.randn(
                config.rank, inputs, generator=generator
            )
            found[f"base_model.model.{module}.lora_B.weight"] = 0.2 * torch.randn(
                outputs, config.rank, generator=generator
            )
    return found


def was_called(silent: socket.socket) -> bool:
    """Whether there was a connection to it since the last call."""
    try:
        silent.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def difference(generation: Generation, folder: Path, expected: Model, first: int = 5) -> float:
    """Between the log-probabilities of a response and those of transformers, at most."""
    tokens, prompt = list(generation.token_ids), [first, *PROMPT]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in expected.tensors:
                a, b = (expected.tensors[f"{module}.lora_{letter}.weight"].double() for letter in "AB")
                weight += expected.scale * (b @ a)
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    log_probs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((log_probs - torch.tensor(list(generation.log_probs))).abs().max())


async def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.02)


def test_updates_of_one_run_leave_requests_of_the_other_alone(fleet, ranks, folder, routers):
    async def scenario() -> None:
        base = [server.weights_checksum() for server in fleet]
        async with two_runs(fleet, ranks, folder, routers) as runs:
            a, b = runs.a, runs.b
            for run in (a, b):  # beside each other
                answer = await run.generate(12)
                assert difference(answer, folder, run.models["0"]) < 1e-5 and answer.weight_version == "0"

            flying = [asyncio.create_task(a.generate(300, first)) for first in range(6, 10)]
            await until(lambda: a.requests() == 4)
            await asyncio.to_thread(b.update, "1", 11)
            await asyncio.to_thread(b.update, "2", 12)
            assert difference(await b.generate(12), folder, b.models["2"]) < 1e-5
            assert a.requests() > 0, "the requests of a ended before the updates of b"
            await asyncio.to_thread(a.update, "1", 1)  # its own update leaves them alone, too
            newest = await a.generate(12)
            assert difference(newest, folder, a.models["1"]) < 1e-5 and newest.weight_version == "1"

            for first, answer in zip(range(6, 10), await asyncio.gather(*flying), strict=True):
                assert (answer.finish_reason, answer.new_tokens) == ("length", 300)
                assert answer.weight_version == "0" and answer.version_spans == [["0", 300]]
                assert difference(answer, folder, a.models["0"], first) < 1e-5
                assert difference(answer, folder, a.models["1"], first) > 0.1 < difference(answer, folder, BASE, first)
            assert b.loaded() == [["1", "2"]] * 2  # the last two
            assert a.loaded() == [["0", "1"]] * 2
            await asyncio.to_thread(a.update, "2", 2)
            assert a.loaded() == [["1", "2"]] * 2
        assert [server.weights_checksum() for server in fleet] == base
        assert {server.weight_version() for server in fleet} == {"default"}

    asyncio.run(scenario())


def test_abort_ends_the_requests_of_one_run_and_unloading_waits_for_none(fleet, ranks, folder, routers):
    async def scenario() -> None:
        async with two_runs(fleet, ranks, folder, routers) as runs:
            a, b = runs.a, runs.b
            others = [asyncio.create_task(b.generate(200, first)) for first in range(6, 10)]
            await until(lambda: b.requests() == 4)
            flying = [asyncio.create_task(a.generate(480, first)) for first in range(6, 26)]
            await until(lambda: a.requests() == 20)  # more than run at a time: most wait in the servers
            await asyncio.to_thread(remove_adapters, fleet[0], a.adapter, 0.2)  # as at the end of a run, too early
            assert a.loaded() == [["0"]] * 2
            await a.client.abort_all()
            aborted = await asyncio.gather(*flying)
            assert {answer.finish_reason for answer in aborted} == {"abort"}
            assert any(answer.new_tokens == 0 for answer in aborted), "none waited"
            assert {answer.finish_reason for answer in await asyncio.gather(*others)} == {"length"}

            with pytest.raises(EngineRequestError):  # too long for the server
                await a.client.generate(PROMPT * 20_000, {"max_new_tokens": 1})
            await until(lambda: a.requests() == 0)  # SGLang itself would count the requests that waited for ever
            for version in ("1", "2"):
                await asyncio.to_thread(a.update, version, int(version))
            assert a.loaded() == [["1", "2"]] * 2

    asyncio.run(scenario())


def test_no_version_reads_the_prefix_cache_of_another(fleet, ranks, folder, routers):
    async def cached_tokens(run: Run) -> list[tuple[str, int]]:
        """Version and cached tokens of the same long prompt, twice on one server."""
        found = []
        for _ in range(2):
            params = {"max_new_tokens": 1, "temperature": 0.0}
            payload = {"input_ids": list(range(3, 60)), "sampling_params": params}
            meta = (await run.client.ask("/generate", payload))["meta_info"]
            assert "weight_versions" not in meta
            found.append((meta["weight_version"], meta["cached_tokens"]))
        return found

    async def scenario() -> None:
        url = fleet[0].url
        run = Run(SharedAdapter("a", "11111111", CONFIG), fleet[:1], ranks, folder)
        async with RouterClient(
            url, [url], concurrency=4, request_timeout_s=60, key=KEY, adapter=run.adapter
        ) as run.client:
            with pytest.raises(EngineError, match="the adapter a has no weights yet"):
                await run.generate(1)
            for version, seed in (("0", 0), ("1", 1), ("1", 2)):  # the last as after a failure: under the same name
                await asyncio.to_thread(run.update, version, seed)
                assert await cached_tokens(run) == [(version, 0), (version, 56)]
            batch = {"input_ids": [[3, 4], [5, 6]], "sampling_params": {"max_new_tokens": 1}}
            answers = await run.client.ask("/generate", batch)
            assert [answer["meta_info"]["weight_version"] for answer in answers] == ["1", "1"]
        remove_adapters(fleet[0], run.adapter)

    asyncio.run(scenario())


def test_late_request_for_an_unloaded_adapter_is_refused_at_once_and_loads_nothing(
    fleet, hub, ranks, folder, routers, tmp_path
):
    save_file(random_adapters(folder, 5, CONFIG), tmp_path / WEIGHTS_NAME)
    (tmp_path / CONFIG_NAME).write_text(json.dumps(peft_config(CONFIG)))

    def refused(server: ServerControl, name: str) -> float:
        """The seconds until the server has refused a request for an adapter."""
        request = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "lora_path": name}
        began = time.monotonic()
        with pytest.raises(EngineRequestError, match="LoRA adapter that has never been loaded"):
            call("POST", f"{server.url}/generate", request, timeout_s=60, key=KEY)
        return time.monotonic() - began

    async def scenario() -> None:
        async with two_runs(fleet, ranks, folder, routers) as runs:
            sent, from_files = runs.a.adapter.at("0"), "of_another_program"
            body = {"lora_name": from_files, "lora_path": str(tmp_path)}
            call("POST", f"{fleet[0].url}/load_lora_adapter", body, timeout_s=60, key=KEY)
            assert from_files in fleet[0].adapter_requests()
            for name in (sent, from_files):
                fleet[0].unload_adapter(name)
                assert refused(fleet[0], name) < 5
            assert list(fleet[0].adapter_requests()) == [runs.b.adapter.at("0")]
            await asyncio.to_thread(runs.b.update, "1", 6)  # loads wait for nothing
            assert difference(await runs.b.generate(5), folder, runs.b.models["1"]) < 1e-5

    asyncio.run(scenario())
    assert not was_called(hub)


def test_request_is_sent_again_where_a_restarted_server_lacks_the_adapter(fleet, hub, ranks, folder, routers):
    async def scenario() -> None:
        async with two_runs(fleet, ranks, folder, routers) as runs:
            a = runs.a
            for server in fleet:
                server.unload_adapter(a.adapter.at("0"))
            waiting = asyncio.create_task(a.generate(5))
            await until(lambda: a.client.resent > 0)
            await asyncio.to_thread(a.update, "1", 3)
            answer = await waiting
            assert answer.weight_version == "1" and difference(answer, folder, a.models["1"]) < 1e-5
            assert difference(await runs.b.generate(5), folder, runs.b.models["0"]) < 1e-5

    asyncio.run(scenario())
    assert not was_called(hub)


def test_failed_run_unloads_its_adapters_and_no_others(fleet, ranks, folder, routers):
    addresses = [server.url.removeprefix("http://") for server in fleet]
    args = Arguments(
        lora_rank=4,
        lora_name="a",
        adapter_owner="11111111",
        rollout_external_engine_addrs=addresses,
        sglang_options={KEY_OPTION: KEY},
    )
    calls: list[str] = []

    def fail() -> None:
        with RolloutManagerCleanup(args, lambda: None, lambda: calls.append("killed")):
            raise RuntimeError("a rank died")

    async def scenario() -> None:
        async with two_runs(fleet, ranks, folder, routers) as runs:
            with pytest.raises(RuntimeError, match="a rank died"):
                await asyncio.to_thread(fail)
            assert calls == ["killed"]
            assert (runs.a.loaded(), runs.b.loaded()) == ([[], []], [["0"], ["0"]])

    asyncio.run(scenario())


def test_calls_about_adapters_need_the_key_of_the_server(fleet):
    for path, body in ((COUNTS_PATH, None), (ABORT_PATH, {"prefix": ""})):
        method = "GET" if body is None else "POST"
        with pytest.raises(EngineRequestError, match="HTTP 401"):
            call(method, fleet[0].url + path, body, timeout_s=10)
        call(method, fleet[0].url + path, body, timeout_s=10, key=KEY)


def test_server_is_refused_by_the_name_of_another_run_and_by_what_it_lacks(fleet, ranks, folder, routers):
    address = fleet[0].url.removeprefix("http://")

    async def scenario() -> None:
        async with two_runs(fleet, ranks, folder, routers):
            own, other = SharedAdapter("a", "11111111", CONFIG), SharedAdapter("a", "33333333", CONFIG)
            larger = SharedAdapter("c", "33333333", AdapterConfig(8, 8.0, TARGETS))
            with pytest.raises(EngineError) as refused:
                inspect(address, str(folder), key=KEY, adapter=other)
            assert (
                f"{address}: another run has its adapter a.11111111@0 there: give this run another --lora-name"
                in str(refused.value)
            )
            with pytest.raises(EngineError) as refused:
                inspect(address, str(folder), key=KEY, adapter=own)
            assert "another run" not in str(refused.value)  # itself, before it was killed
            with pytest.raises(EngineError, match="it has --max-lora-rank 4, and --lora-rank is 8: give it that"):
                inspect(address, str(folder), key=KEY, adapter=larger)
            with pytest.raises(EngineError, match="it serves the adapters a.11111111@0, b.22222222@0 of other runs"):
                inspect(address, str(folder), key=KEY)

    asyncio.run(scenario())
