"""Two runs train adapters at once, on the same external server, and end as each does alone; three on two servers."""

from __future__ import annotations

import contextlib
import os
import re
import signal

import pytest
import torch
from safetensors.torch import load_file

from slimrl.engines.http import call
from slimrl.engines.sglang.control import ServerControl
from slimrl.models.adapters import TARGETS, WEIGHTS_NAME
from tests.end_to_end import harness
from tests.end_to_end.serving import served
from tests.megatron.launch import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROLLOUTS = 40  # seconds: more than one run starts later than the other
LORA = ("--enable-lora", "--max-lora-rank", "4", "--lora-target-modules", *TARGETS, "--max-loras-per-batch", "3")


@pytest.fixture(scope="module")
def log_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def url(tiny, log_folder):
    with served(tiny.model, log_folder, "--enable-deterministic-inference", "--disable-radix-cache", *LORA) as url:
        yield url


def flags_of(name, url, tiny, folder, num_rollout):
    """The runs differ in everything that decides their samples and weights."""
    seed = {"a": 1, "b": 2, "c": 3}[name]
    return tiny.flags(
        actor_num_gpus_per_node=1,
        num_rollout=num_rollout,
        seed=seed,
        rollout_seed=seed,
        lr=1e-2 * seed,
        lora_rank=4,
        lora_alpha=8,
        lora_name=name,
        save=folder / "checkpoints",
        load=folder / "checkpoints",
        save_hf=folder / "exported_{rollout_id}",
        check_weight_update_equal=True,
        rollout_external_engine_addrs=url.removeprefix("http://").split(),
        sglang_enable_deterministic_inference=None,
        sglang_disable_radix_cache=None,
    )


def start(name, url, tiny, folder, num_rollout=ROLLOUTS, more=()):
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*flags_of(name, url, tiny, folder, num_rollout), *more]
    return harness.start("train.py", flags, folder, name, tiny.home)


def adapters_of(run, folder, rollouts=ROLLOUTS):
    """The trained adapters of a finished run, which sampled each rollout from its own newest version."""
    done = run.finish(400)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    assert done.steps("weight_version") == [str(rollout) for rollout in range(rollouts)]
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
    assert min(done.steps("grad_norm")) > 0
    return load_file(folder / f"exported_{rollouts - 1}" / WEIGHTS_NAME)


def test_two_runs_at_once_train_what_each_trains_alone(url, tiny, log_folder, tmp_path):
    alone = {}
    for name in ("a", "b"):
        folder = tmp_path / "alone" / name
        alone[name] = adapters_of(start(name, url, tiny, folder), folder)
    assert all(not torch.equal(alone["a"][key], alone["b"][key]) for key in alone["a"])
    log = log_folder / "server.log"
    before = log.stat().st_size
    together = {name: tmp_path / "together" / name for name in ("a", "b")}
    runs = {name: start(name, url, tiny, folder) for name, folder in together.items()}
    for name, folder in together.items():
        found = adapters_of(runs[name], folder)
        assert found.keys() == alone[name].keys()
        assert all(torch.equal(found[key], alone[name][key]) for key in found)
    text = log.read_bytes()[before:].decode(errors="replace")
    loads = re.findall(r"Start load Lora.*name=([ab])\.[0-9a-f]{8}@(\d+)", text)
    first, last = "0", str(ROLLOUTS)
    assert len(loads) == len(set(loads)) == 2 * (ROLLOUTS + 1)
    assert loads.index(("a", first)) < loads.index(("b", last)) and loads.index(("b", first)) < loads.index(("a", last))
    assert ServerControl(url).adapter_requests() == {}  # each run has unloaded its own
    assert ServerControl(url).weight_version() == "default"


def test_three_runs_at_once_on_a_server_of_one_rank_and_one_of_two(tiny, tmp_path):
    """Each samples every rollout from its own newest version: on either server the trainer's log-probabilities."""
    lora = (*LORA[:-1], "4")
    with (
        served(tiny.model, tmp_path / "whole", *lora) as whole,
        served(tiny.model, tmp_path / "halves", *lora, "--tp-size", "2") as halves,
    ):
        both = f"{whole} {halves.removeprefix('http://')}"
        runs = {name: start(name, both, tiny, tmp_path / name, num_rollout=10) for name in "abc"}
        found = {name: adapters_of(run, tmp_path / name, rollouts=10) for name, run in runs.items()}
        assert [ServerControl(url).adapter_requests() for url in (whole, halves)] == [{}, {}]
    assert all(not torch.equal(found["a"][key], found["c"][key]) for key in found["a"])
    for folder in ("whole", "halves"):
        loads = re.findall(
            r"Start load Lora.*name=([abc])\.[0-9a-f]{8}@(\d+)", (tmp_path / folder / "server.log").read_text()
        )
        assert {(name, str(version)) for name in "abc" for version in range(11)} <= set(loads)


def test_interrupted_run_leaves_no_adapter(url, tiny, tmp_path):
    run = start("a", url, tiny, tmp_path / "a", num_rollout=5000)
    run.wait_for_line("step 1 |", 300)
    os.killpg(run.process.pid, signal.SIGINT)
    done = run.finish(100)
    assert (done.code, done.left) == (130, [])
    assert ServerControl(url).adapter_requests() == {}
    assert call("POST", f"{url}/generate", {"text": "1+1="}, timeout_s=30)["text"]  # the server goes on


def test_adapters_of_a_killed_run_are_refused_to_others_and_replaced_when_it_resumes(url, tiny, tmp_path):
    saves = ("--save-interval", "1")
    killed = start("a", url, tiny, tmp_path / "a", 6, saves)
    killed.wait_for_line("iter_0000000", 300)
    killed.kill_everything()
    (left, *_) = ServerControl(url).adapter_requests()
    refused = start("a", url, tiny, tmp_path / "other").finish(100)
    assert refused.code != 0
    assert f"another run has its adapter {left}" in refused.output
    assert left in ServerControl(url).adapter_requests()
    done = start("a", url, tiny, tmp_path / "a", 6, saves).finish(300)
    assert done.code == 0, done.output[-6000:]
    assert "resuming from" in done.output
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
    assert ServerControl(url).adapter_requests() == {}


def test_restarted_server_gets_the_newest_adapter_before_it_serves_the_run_again(tiny, tmp_path):
    port = free_port()
    watched = ["--use-fault-tolerance", "--rollout-health-check-interval", "1", "--rollout-health-check-timeout", "5"]
    with served(tiny.model, tmp_path, *LORA) as url, contextlib.ExitStack() as stack:
        other = stack.enter_context(served(tiny.model, tmp_path / "other", *LORA, port=port))
        both = f"{url} {other.removeprefix('http://')}"
        run = start("a", both, tiny, tmp_path / "a", num_rollout=5000, more=watched)
        run.wait_for_line("step 2 |", 300)
        stack.close()
        run.wait_for_line("it is excluded until it is back", 60)
        with served(tiny.model, tmp_path / "again", *LORA, port=port):
            run.wait_for_line("and serves", 100)
            assert any(name.startswith("a.") for name in ServerControl(other).adapter_requests())
            os.killpg(run.process.pid, signal.SIGINT)
            done = run.finish(100)
            assert (done.code, done.left) == (130, [])
            assert [ServerControl(one).adapter_requests() for one in (url, other)] == [{}, {}]
        assert len(done.summary["steps"]) > 3
        assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
