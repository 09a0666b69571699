"""External servers: which are accepted, that a busy one counts as alive, and that a silent one counts as lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import socket
from pathlib import Path

import pytest
from aiohttp import web

from slimrl.arguments import Arguments
from slimrl.cluster.engines.engine_group import ExternalEngine, adapter_owner
from slimrl.cluster.launch import check_servers_reachable
from slimrl.engines.protocol import EngineError, EngineUnavailableError
from slimrl.engines.sglang.adapters import ABORT_PATH, COUNTS_PATH
from slimrl.engines.sglang.external_server_check import NEEDED_PATHS, ExternalServer
from slimrl.engines.sglang.router import ExternalRouter
from slimrl.engines.shared_adapters import OWNER_FILE, owner_of
from tests.megatron.launch import free_port

STARTED = (1.0, None, None)


@contextlib.asynccontextmanager
async def busy_server():
    """Answers like SGLang while its scheduler waits for others: /get_load works, /health and /server_info do not."""

    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    app = web.Application()
    app.router.add_get("/v1/loads", lambda request: web.json_response({"loads": []}))
    app.router.add_get("/health", silent)
    app.router.add_get("/server_info", silent)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner
    finally:
        await runner.cleanup()


def test_busy_server_is_alive_and_a_stopped_one_is_lost():
    async def run() -> None:
        async with busy_server() as runner:
            address = f"127.0.0.1:{runner.addresses[0][1]}"
            engine = ExternalEngine(address, 0, Arguments(rollout_health_check_timeout=0.4))
            engine._server = ExternalServer(engine.url, 1, STARTED)
            watch = asyncio.ensure_future(engine.watch())
            await asyncio.wait([watch], timeout=1.5)
            assert not watch.done()
            await runner.cleanup()
            end = await asyncio.wait_for(watch, 30)
        assert end.what == (
            f"SGLang server 0 of --rollout-external-engine-addrs: http://{address} has not answered for 0.4 s"
            " (--rollout-health-check-timeout)"
        )

    asyncio.run(run())


@contextlib.asynccontextmanager
async def server_of(folder, version: str, *, makes_tokens: bool = True, instead: dict | None = None):
    """Serves what `inspect` requests, with other answers `instead` at some paths; yields its address."""

    async def health(request: web.Request) -> web.Response:
        return web.Response(status=200 if makes_tokens else 503)

    model = {"is_generation": True, "model_path": str(folder), "weight_version": version}
    answers = {
        "/server_info": {"tp_size": 1, "startup_time": 1.0},
        "/model_info": model,
        "/openapi.json": {"paths": dict.fromkeys(NEEDED_PATHS, {})},
        **(instead or {}),
    }
    app = web.Application()
    for path, answer in answers.items():
        app.router.add_get(path, lambda request, answer=answer: web.json_response(answer))
    app.router.add_get("/health_generate", health)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("version", "makes_tokens", "refusal"),
    [
        ("default", True, None),
        (
            "17",
            True,
            "it has the weights '17' of another run, and --debug-rollout-only updates none: restart it",
        ),
        (
            "default",
            False,
            "it generates no token within 25 s, as after an interrupted weight update: POST /continue_generation",
        ),
    ],
)
def test_server_without_a_trainer_must_have_weights_and_not_be_paused(tmp_path, version, makes_tokens, refusal):
    (tmp_path / "config.json").write_text("{}")

    async def start(*, debug_rollout_only: bool) -> None:
        async with server_of(tmp_path, version, makes_tokens=makes_tokens) as address:
            args = Arguments(hf_checkpoint=str(tmp_path), debug_rollout_only=debug_rollout_only)
            await ExternalEngine(address, 0, args).start(5)

    asyncio.run(start(debug_rollout_only=False))  # a weight update repairs it
    expected = pytest.raises(EngineError, match=re.escape(refusal)) if refusal else contextlib.nullcontext()
    with expected:
        asyncio.run(start(debug_rollout_only=True))


FLEET = {
    "tp_size": 1,
    "enable_lora": True,
    "max_lora_rank": 8,
    "lora_target_modules": ["all"],
    "max_loras_per_batch": 3,
}


@pytest.mark.parametrize(
    ("server", "version", "loaded", "refusal"),
    [
        ({}, "default", {}, None),
        ({}, "default", {"a.11111111@7": 0, "ab.22222222@1": 2, "b": 1}, None),  # its own before a kill, and others'
        (
            {"enable_lora": None},
            "default",
            {},
            "it loads no LoRA adapters: start it with --enable-lora --max-lora-rank 8 --lora-target-modules q_proj"
            " v_proj, or give --lora-merge",
        ),
        ({"max_lora_rank": 4}, "default", {}, "it has --max-lora-rank 4, and --lora-rank is 8: give it that"),
        (
            {"lora_target_modules": ["q_proj", "o_proj"]},
            "default",
            {},
            "it has --lora-target-modules without v_proj: start it with q_proj v_proj",
        ),
        (
            {"max_loras_per_batch": 1},
            "default",
            {},
            "it has --max-loras-per-batch 1, so that runs wait for each other: give the number of runs and one more",
        ),
        (
            {"max_loaded_loras": 4},
            "default",
            {},
            "it has --max-loaded-loras 4, with which an update of one run removes the adapter of another: start it"
            " without",
        ),
        (
            {"tokenizer_worker_num": 2},
            "default",
            {},
            "it has --tokenizer-worker-num 2, and a call about adapters reaches only one of these processes: start it"
            " without",
        ),
        (
            {"speculative_algorithm": "NGRAM"},
            "default",
            {},
            "it has --speculative-algorithm NGRAM, and draft models do not have the adapters: start it without",
        ),
        ({}, "3", {}, "it has the weights '3' of another run, and adapters need the base: restart it"),
        (
            {},
            "default",
            {"a.99999999@2": 1},
            "another run has its adapter a.99999999@2 there: give this run another --lora-name than a; if that run has"
            " ended without removing it, POST /unload_lora_adapter with that lora_name",
        ),
        (
            {},
            "default",
            None,
            "it has no calls for the adapters of one run: start it with python3 -m slimrl.engines.sglang.entry server"
            " (without a GPU: python3 -m slimrl.engines.sglang.cpu_patches) and the flags of sglang.launch_server",
        ),
    ],
)
def test_server_of_several_runs_is_checked_for_their_adapters(tmp_path, server, version, loaded, refusal):
    (tmp_path / "config.json").write_text("{}")
    calls = NEEDED_PATHS if loaded is None else (*NEEDED_PATHS, COUNTS_PATH, ABORT_PATH)
    instead = {"/server_info": {**FLEET, **server}, "/openapi.json": {"paths": dict.fromkeys(calls, {})}}
    if loaded is not None:
        instead[COUNTS_PATH] = {"adapters": loaded}

    async def start() -> None:
        async with server_of(tmp_path, version, instead=instead) as address:
            args = Arguments(
                hf_checkpoint=str(tmp_path),
                lora_rank=8,
                lora_target_modules=["q_proj", "v_proj"],
                lora_name="a",
                adapter_owner="11111111",
                rollout_external_engine_addrs=[address],
            )
            engine = ExternalEngine(address, 0, args)
            if refusal is None:
                return await engine.start(5)
            with pytest.raises(EngineError) as refused:
                await engine.start(5)
            assert str(refused.value) == f"--rollout-external-engine-addrs {address}: {refusal}"

    asyncio.run(start())


def test_run_that_updates_all_weights_is_refused_by_a_server_of_adapters(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    paths = {"paths": dict.fromkeys((*NEEDED_PATHS, COUNTS_PATH), {})}
    instead = {"/openapi.json": paths, COUNTS_PATH: {"adapters": {"a.11111111@3": 0}}}

    async def start() -> None:
        async with server_of(tmp_path, "default", instead=instead) as address:
            with pytest.raises(
                EngineError, match="it serves the adapters a.11111111@3 of other runs, and this run would"
            ):
                await ExternalEngine(address, 0, Arguments(hf_checkpoint=str(tmp_path))).start(5)
            await ExternalEngine(address, 0, Arguments(hf_checkpoint=str(tmp_path), debug_rollout_only=True)).start(5)

    asyncio.run(start())


def test_owner_of_adapters_is_the_folder_of_the_run_also_after_a_restart(tmp_path):
    def owner(**flags) -> str:
        args = Arguments(lora_rank=8, rollout_external_engine_addrs=["10.0.0.1:1"], run_dir=str(tmp_path / "run"))
        return adapter_owner(dataclasses.replace(args, **flags))

    save = str(tmp_path / "checkpoints")
    assert re.fullmatch("[0-9a-f]{8}", owner())
    assert owner() == owner(save=save, num_rollout=0)  # an evaluation may share the folder of a run
    assert owner(save=save) == owner(save=save, run_dir=str(tmp_path / "resumed")) != owner()
    assert owner(lora_merge=True) == "" == owner(rollout_external_engine_addrs=None)


def test_copied_or_moved_folder_has_adapters_of_its_own(tmp_path, monkeypatch, caplog):
    original, copied, moved = (tmp_path / name for name in ("original", "copied", "moved"))
    owner = owner_of(original)
    shutil.copytree(original, copied)
    assert owner_of(copied) != owner == owner_of(original)
    assert owner_of(copied) == owner_of(copied)
    assert {path.name for path in copied.iterdir()} == {OWNER_FILE}  # nothing unfinished

    (tmp_path / "link").symlink_to(original)
    monkeypatch.chdir(tmp_path)
    assert owner == owner_of(tmp_path / "link") == owner_of(Path("original"))  # other names of one folder
    copied_owner = owner_of(copied)
    copied.rename(moved)
    with caplog.at_level("INFO"):
        assert owner_of(moved) not in (owner, copied_owner)
    assert f"{moved} is a copy of {copied}, or was moved" in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        "",
        "12345678",
        "{",
        '{"id": "1234567", "folder": "HERE"}',
        '{"id": "1234567G", "folder": "HERE"}',
        '{"id": null}',
    ],
)
def test_damaged_owner_is_replaced(tmp_path, content):
    (tmp_path / OWNER_FILE).write_text(content.replace("HERE", str(tmp_path)))
    owner = owner_of(tmp_path)
    assert re.fullmatch("[0-9a-f]{8}", owner) and owner not in content
    assert owner_of(tmp_path) == owner


def test_killed_write_of_the_owner_leaves_none(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            owner_of(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert owner_of(tmp_path) == owner_of(tmp_path)


@pytest.mark.parametrize(
    ("path", "answer", "wrong"),
    [
        (
            "/server_info",
            None,
            "/server_info did not answer as SGLang does: Expected `object`, got `null`; it answered",
        ),
        ("/server_info", {"tp_size": "two"}, "got `str` - at `$.tp_size`; it answered {'tp_size': 'two'}"),
        ("/server_info", {}, "missing required field `tp_size`; it answered {}"),
        (
            "/model_info",
            ["m"],
            "/model_info did not answer as SGLang does: Expected `object`, got `array`; it answered",
        ),
        ("/model_info", {"is_generation": 1}, "got `int` - at `$.is_generation`; it answered {'is_generation': 1}"),
        (
            "/openapi.json",
            {"paths": None},
            "/openapi.json did not answer as SGLang does: Expected `object`, got `null`",
        ),
    ],
)
def test_invalid_server_response_is_rejected_with_address_field_and_value(tmp_path, path, answer, wrong):
    (tmp_path / "config.json").write_text("{}")

    async def start() -> None:
        async with server_of(tmp_path, "default", instead={path: answer}) as address:
            with pytest.raises(EngineError) as refused:
                await ExternalEngine(address, 0, Arguments(hf_checkpoint=str(tmp_path))).start(5)
            assert str(refused.value).startswith(
                f"--rollout-external-engine-addrs {address}: this is no server with SGLang's calls"
            )
            assert wrong in str(refused.value)

    asyncio.run(start())


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ("null", "Expected `object`, got `null`; it answered None"),
        ('{"workers": [{"id": "a"}]}', "missing required field `url` - at `$.workers[0]`; it answered"),
        ('{"workers": [{"id": "a", "url": "u", "is_healthy": "yes"}]}', "got `str` - at `$.workers[0].is_healthy`"),
    ],
)
def test_external_router_with_invalid_responses_is_named(answer, wrong):
    async def check() -> None:
        app = web.Application()
        app.router.add_get("/workers", lambda request: web.Response(text=answer))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            with pytest.raises(EngineError, match="the router .* .--sglang-router-ip, --sglang-router-port") as refused:
                await asyncio.to_thread(ExternalRouter("127.0.0.1", runner.addresses[0][1]).check)
            assert wrong in str(refused.value)
        finally:
            await runner.cleanup()

    asyncio.run(check())


def test_unreachable_addresses_are_named_at_startup():
    closed, also_closed = f"127.0.0.1:{free_port()}", f"[::1]:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        open_address = f"127.0.0.1:{listening.getsockname()[1]}"
        check_servers_reachable([open_address])
        with pytest.raises(EngineUnavailableError) as failure:
            check_servers_reachable([closed, open_address, also_closed])
    lines = str(failure.value).split("\n")
    assert [line.split(": ", 1)[0].split()[1] for line in lines] == [closed, also_closed]
    assert all("no server answers there" in line and line.endswith("start it first") for line in lines)
    check_servers_reachable([])
