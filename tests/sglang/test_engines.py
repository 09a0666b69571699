"""Two real SGLang servers behind the real router, against transformers."""

from __future__ import annotations

import asyncio
import base64
import copy
import datetime
import http.client
import io
import itertools
import json
import random
import signal
import string
import threading
import time
import urllib.parse
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper
from transformers import AutoTokenizer

from examples import calculator, search
from slimrl.arguments.hf_config import RESERVED_TOKENS, stated_context
from slimrl.data.sample import PackedColumn, Sample
from slimrl.engines.protocol import EngineError, EngineRequestError, Generation, SamplingConfig
from slimrl.engines.sglang.client import RouterClient
from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.router import RouterProcess, router_options
from tests.sglang import rollout_jobs

pytestmark = pytest.mark.slow
PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def reference(fleet):
    """The served model in transformers, fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(fleet.model_path, dtype=torch.float32).eval()


@pytest.fixture
def controls(fleet):
    return [ServerControl(url, timeout_s=60) for url in fleet.server_urls]


def run(fleet, coroutine_of_client, *, concurrency: int = 64):
    """Runs `coroutine_of_client(client)` in its own event loop."""

    async def body():
        async with RouterClient(
            fleet.router.url, fleet.server_urls, concurrency=concurrency, request_timeout_s=120
        ) as client:
            return await coroutine_of_client(client)

    return asyncio.run(body())


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(3, 64) for _ in range(generator.randrange(4, 40))] for _ in range(count)]


def sampling(max_new_tokens: int, **others) -> dict:
    return {"max_new_tokens": max_new_tokens, "temperature": 1.0, "ignore_eos": True, **others}


def generate_all(fleet, prompts, params_of) -> list[Generation]:
    async def body(client):
        return await asyncio.gather(*(client.generate(ids, params_of(i)) for i, ids in enumerate(prompts)))

    return run(fleet, body)


def largest_error(model, prompt: list[int], generation: Generation) -> float:
    """Largest difference between the engine's and transformers' log-probabilities of the new tokens."""
    with torch.no_grad():
        scores = model(torch.tensor([prompt + generation.token_ids])).logits[0].log_softmax(-1)
    rows = torch.arange(len(prompt) - 1, len(prompt) - 1 + len(generation.token_ids))
    expected = scores[rows, torch.tensor(generation.token_ids)]
    return (torch.tensor(generation.log_probs) - expected).abs().max().item()


def moved_copy(model, seed: int):
    """The same model with noise added to every parameter."""
    torch.manual_seed(seed)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return moved


def hf_tensors(model) -> list[tuple[str, torch.Tensor]]:
    return [(name, t.detach().contiguous()) for name, t in model.state_dict().items() if name != "lm_head.weight"]


def test_log_probs_through_the_router_match_transformers(fleet, reference):
    prompts = random_prompts(16)
    answers = generate_all(fleet, prompts, lambda i: sampling(12))
    assert all(len(a.token_ids) == len(a.log_probs) == 12 and a.finish_reason == "length" for a in answers)
    assert max(largest_error(reference, ids, a) for ids, a in zip(prompts, answers, strict=True)) < 1e-5


def test_responses_are_read_at_once_and_not_entry_by_entry(fleet):
    async def body(client):
        answer = await client.generate(PROMPT, sampling(12))
        return isinstance(answer.column("log_probs"), PackedColumn), answer.log_probs

    packed, log_probs = run(fleet, body)
    assert packed and len(log_probs) == 12


def test_idle_connection_outlives_the_servers_default_of_five_seconds(fleet):
    """The router reuses connections for 50 s; to it, a server that closes them at that moment is broken."""
    address = urllib.parse.urlsplit(fleet.server_urls[0]).netloc
    connection = http.client.HTTPConnection(address, timeout=10)
    sockets = []
    for pause in (0, 6):
        time.sleep(pause)
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b""
        sockets.append(connection.sock)
    assert sockets[0] is sockets[1] is not None
    connection.close()


def test_long_prompts_in_chunks_and_cached_prefixes_give_transformers_greedy_answers(fleet, reference):
    """Prompts longer than a chunk of prefill, whose first 200 tokens a server may have seen."""
    draw = random.Random(11)
    beginning = draw.choices(range(3, 64), k=200)
    prompts = [beginning + draw.choices(range(3, 64), k=draw.randrange(100, 400)) for _ in range(12)]
    for _ in range(2):  # the second time a server has seen whole prompts
        answers = generate_all(fleet, prompts, lambda i: sampling(40) | {"temperature": 0.0})
        for prompt, answer in zip(prompts, answers, strict=True):
            with torch.no_grad():
                scores = reference(torch.tensor([prompt + answer.token_ids])).logits[0].log_softmax(-1)
            expected = scores[len(prompt) - 1 : -1].max(-1)
            assert answer.token_ids == expected.indices.tolist()
            assert (torch.tensor(answer.log_probs) - expected.values).abs().max() < 1e-5


def test_seed_gives_the_same_tokens_alone_and_in_a_batch(fleet):
    alone = generate_all(fleet, [PROMPT], lambda i: sampling(24, sampling_seed=77))[0]
    batch = generate_all(fleet, [PROMPT] * 16, lambda i: sampling(24, sampling_seed=77 if i % 2 else 1000 + i))
    assert all(answer.token_ids == alone.token_ids for answer in batch[1::2])
    assert len({tuple(answer.token_ids) for answer in batch[0::2]}) == 8


def test_turns_of_a_session_reach_one_server(fleet, controls, tmp_path):
    """Each server's weight version identifies it in the responses."""
    options = router_options({}, request_timeout_s=60, conversations=True)
    router = RouterProcess(log_path=tmp_path / "router.log", options=options)
    before = [control.weight_version() for control in controls]

    async def body():
        async with RouterClient(router.url, [], concurrency=64, request_timeout_s=60) as client:

            async def converse(session: str | None, prompts) -> list[str]:
                answers = [await client.generate(ids, sampling(1), session_id=session) for ids in prompts]
                return [answer.weight_version for answer in answers]

            sessions = [converse(f"session {i}", random_prompts(5, seed=i)) for i in range(12)]
            others = [converse(None, random_prompts(5, seed=i)) for i in range(12, 24)]
            return await asyncio.gather(*sessions), await asyncio.gather(*others)

    try:
        for control, name in zip(controls, ("left", "right"), strict=True):
            control.set_weight_version(name)
        router.start()
        router.wait_alive(60)
        for server in fleet.servers:
            router.add_worker(server.url)
        router.wait_ready(2, 60)
        sessions, others = asyncio.run(body())
    finally:
        router.stop()
        for control, version in zip(controls, before, strict=True):
            control.set_weight_version(version)
    assert all(len(set(versions)) == 1 for versions in sessions)
    assert {versions[0] for versions in sessions} == {"left", "right"}
    assert {version for versions in others for version in versions} == {"left", "right"}


def test_abort_returns_aligned_partial_responses(fleet, reference):
    async def body(client):
        tasks = [asyncio.create_task(client.generate(ids, sampling(900))) for ids in prompts]
        await asyncio.sleep(1.0)
        await client.abort_all()
        assert client.in_flight == 0
        return await asyncio.gather(*tasks)

    prompts = random_prompts(80)  # more than the 2 x 32 that may run, and more than the client's GPUs
    answers = run(fleet, body, concurrency=70)
    assert all(a.finish_reason == "abort" and len(a.token_ids) == len(a.log_probs) < 900 for a in answers)
    begun = [(ids, a) for ids, a in zip(prompts, answers, strict=True) if a.token_ids]
    assert len(begun) >= 32
    assert max(largest_error(reference, ids, a) for ids, a in begun[:4]) < 1e-5
    assert [a.weight_version for a in answers[70:]] == [""] * 10


def test_interrupted_and_continued_rollouts_match_uninterrupted_ones(fleet, reference, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(fleet.model_path)
    args = rollout_jobs.rollout_args(tmp_path)
    plan = SamplingConfig.for_training(args)

    async def uncut(client, sample):
        prompt = sample.tokens[: sample.prompt_length]
        return await client.generate(prompt, plan.params(Sample(prompt="", tokens=prompt), sample.index))

    async def body(client):
        outputs, source = await rollout_jobs.roll(client, args, tokenizer, rollouts=4)
        samples = rollout_jobs.samples_of(outputs)
        return outputs, source, samples, await asyncio.gather(*(uncut(client, sample) for sample in samples))

    outputs, source, samples, answers = run(fleet, body)
    assert sum(output.metrics["rollout/partial/continued"] for output in outputs) >= 4
    assert any(len(sample.weight_versions) > 1 for sample in samples)
    for sample, answer in zip(samples, answers, strict=True):
        assert sample.tokens[sample.prompt_length :] == answer.token_ids
        assert len(sample.rollout_log_probs) == sample.response_length <= 250
    assert max(rollout_jobs.largest_difference(reference, sample) for sample in samples) < 1e-4
    state = source.state_dict()
    left = [group[0]["group_index"] for group in state["returned"]]
    assert sorted(left + [sample.group_index for sample in samples[::2]]) == list(range(state["next_group_index"]))


def test_calculator_agent_is_trained_on_its_sampled_tokens(fleet, reference, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(fleet.model_path)
    args = rollout_jobs.rollout_args(tmp_path, custom_generate_function_path="examples.calculator.generate")

    async def body(client):
        return await rollout_jobs.roll(client, args, tokenizer, rollouts=3)

    outputs, _ = run(fleet, body)
    samples = rollout_jobs.samples_of(outputs)
    calls = 0
    for sample in samples:
        response, starts = sample.tokens[sample.prompt_length :], sample.metadata["turn_starts"]
        for start, after in itertools.pairwise(starts):
            written = sum(sample.loss_mask[start:after])
            assert sample.loss_mask[start:after] == [1] * written + [0] * (after - start - written)
            text = tokenizer.decode(response[start : start + written])
            answer = asyncio.run(calculator.answer(text))
            said = tokenizer(answer, add_special_tokens=False)["input_ids"]
            assert response[start + written : after] == said[: after - start - written]
            calls += 1
        assert all(sample.loss_mask[starts[-1] :])
    assert calls >= 3
    assert max(rollout_jobs.largest_difference(reference, sample) for sample in samples) < 1e-4


@pytest.mark.parametrize("agent", ["search_agent", "tool_agent"])
def test_slime_agent_is_trained_on_its_sampled_tokens(fleet, reference, tmp_path, monkeypatch, agent):
    """Both agents query the real router; once the batch is full, requests in flight are aborted and restart."""
    monkeypatch.syspath_prepend(Path(rollout_jobs.__file__).parents[1] / "compatibility/slime_style")
    tokenizer = AutoTokenizer.from_pretrained(fleet.model_path)
    args = rollout_jobs.rollout_args(
        tmp_path,
        custom_generate_function_path=f"{agent}.generate",
        partial_rollout=False,
        dynamic_sampling_filter_path="slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        rollout_max_response_len=120,
        rollout_max_context_len=200,
        hf_checkpoint=str(fleet.model_path),
        sglang_router_ip="127.0.0.1",
        sglang_router_port=fleet.router.port,
    )

    async def body(client):
        return await rollout_jobs.roll(client, args, tokenizer, rollouts=2)

    outputs, _ = run(fleet, body)
    samples = rollout_jobs.samples_of(outputs)
    assert len(samples) == 16 and sum(0 in sample.loss_mask for sample in samples) >= 3
    assert all(len(sample.tokens) <= 200 for sample in samples if agent == "tool_agent")
    assert max(rollout_jobs.largest_difference(reference, sample) for sample in samples) < 1e-4


def test_search_agent_reads_the_index_and_is_trained_on_its_own_tokens(fleet, reference, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "CALL", ("<", ">"))  # text that a random model of these characters writes often enough
    monkeypatch.setattr(search, "ANSWER", ("[", "]"))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{c}-{ord(c)}!"}) + "\n" for c in string.ascii_uppercase))
    search.build(corpus, tmp_path / "index.sqlite")
    tokenizer = AutoTokenizer.from_pretrained(fleet.model_path)
    own = {"search_index": str(tmp_path / "index.sqlite")}
    args = rollout_jobs.rollout_args(tmp_path, custom_generate_function_path="examples.search.generate", custom=own)

    async def body(client):
        return await rollout_jobs.roll(client, args, tokenizer, rollouts=2)

    outputs, _ = run(fleet, body)
    samples = rollout_jobs.samples_of(outputs)
    found = 0
    for sample in samples:
        response, starts = sample.tokens[sample.prompt_length :], sample.metadata["turn_starts"]
        for start, after in itertools.pairwise(starts):
            written = sum(sample.loss_mask[start:after])
            assert sample.loss_mask[start:after] == [1] * written + [0] * (after - start - written)
            text = tokenizer.decode(response[start : start + written])
            question = text[text.rindex("<") : text.index(">")] if "<" in text else ""
            passages = search.search(tmp_path / "index.sqlite", question)
            answer = f"[{' '.join(passages) or 'nothing found'}]"
            said = tokenizer(answer, add_special_tokens=False)["input_ids"]
            assert response[start + written : after] == said[: after - start - written]
            found += bool(passages)
    assert found >= 3
    assert max(rollout_jobs.largest_difference(reference, sample) for sample in samples) < 1e-4


def test_overlong_prompt_is_rejected_once_with_the_server_message(fleet):
    async def body(client):
        sent = 0
        post = client._post

        async def counted(*args):
            nonlocal sent
            sent += 1
            return await post(*args)

        client._post = counted
        with pytest.raises(EngineRequestError, match="longer than the model's context length") as caught:
            await client.generate([5] * 2000, sampling(4))
        return sent, caught.value.status

    assert run(fleet, body) == (1, 400)


def test_longest_accepted_prompt_is_the_longest_the_server_takes(fleet):
    limit = stated_context(json.loads((fleet.model_path / "config.json").read_text())) - RESERVED_TOKENS

    async def body(client):
        answer = await client.generate([5] * (limit - 1), sampling(1))
        with pytest.raises(EngineRequestError, match="exceeds the maximum allowed length") as caught:
            await client.generate([5] * limit, sampling(1))
        return len(answer.token_ids), caught.value.status

    assert run(fleet, body) == (1, 400)


def test_weights_from_tensors_arrive_without_stale_kv(fleet, reference, controls):
    before = generate_all(fleet, [PROMPT] * 4, lambda i: sampling(8))  # fills both servers' prefix caches
    assert max(largest_error(reference, PROMPT, a) for a in before) < 1e-5
    moved = moved_copy(reference, seed=1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    for control in controls:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(hf_tensors(moved))
        with control.weight_update("1"):
            control.update_weights_from_tensor([base64.b64encode(buffer.getvalue()).decode()])
            assert control.weight_version() != "1"
        assert control.weight_version() == "1"
    after = generate_all(fleet, [PROMPT] * 4, lambda i: sampling(8))
    assert max(largest_error(moved, PROMPT, a) for a in after) < 1e-5
    assert min(largest_error(reference, PROMPT, a) for a in after) > 1e-2
    assert {a.weight_version for a in after} == {"1"}


def test_weights_from_a_gloo_broadcast_arrive_without_stale_kv(fleet, reference, controls):
    moved = moved_copy(reference, seed=2)
    tensors = hf_tensors(moved)
    store = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)

    def join(rank: int) -> None:
        controls[rank - 1].init_weights_update_group(
            master_address="127.0.0.1",
            master_port=store.port,
            rank_offset=rank,
            world_size=3,
            group_name="test",
            backend="gloo",
        )

    def receive(control: ServerControl) -> None:
        with control.weight_update("2"):
            ready.wait()
            control.update_weights_from_distributed(
                [name for name, _ in tensors],
                ["float32"] * len(tensors),
                [list(tensor.shape) for _, tensor in tensors],
                group_name="test",
            )

    ready = threading.Barrier(2)
    joins = start_all(join, [1, 2])
    group, _ = _new_process_group_helper(
        3,
        0,
        [],
        dist.Backend("gloo"),
        dist.PrefixStore("test", store),
        group_name="test",
        timeout=datetime.timedelta(seconds=60),
    )
    finish(joins)
    receivers = start_all(receive, controls)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    for _, tensor in tensors:
        group.broadcast([tensor], options).wait()
    finish(receivers)
    for control in controls:
        control.destroy_weights_update_group("test")
    after = generate_all(fleet, [PROMPT] * 4, lambda i: sampling(8))
    assert max(largest_error(moved, PROMPT, a) for a in after) < 1e-5
    assert {a.weight_version for a in after} == {"2"}


def start_all(function, arguments) -> list[threading.Thread]:
    threads = [threading.Thread(target=function, args=(argument,), daemon=True) for argument in arguments]
    for thread in threads:
        thread.start()
    return threads


def finish(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_weights_from_disk_arrive_and_the_checker_detects_differences(fleet, reference, controls, tmp_path):
    first = controls[0]
    with first.weight_update("base"):
        first.update_weights_from_disk(str(fleet.model_path))
    first.snapshot_weights()
    base = first.weights_checksum()
    first.reset_weights()
    with pytest.raises(EngineRequestError, match=r"model\.layers\.0\.self_attn\.qkv_proj\.weight"):
        first.compare_weights()
    for control in controls:
        with control.weight_update("3"):
            control.update_weights_from_disk(str(fleet.model_path))
    first.compare_weights()
    assert first.weights_checksum() == base == controls[1].weights_checksum()
    after = generate_all(fleet, [PROMPT] * 4, lambda i: sampling(8))
    assert max(largest_error(reference, PROMPT, a) for a in after) < 1e-5
    assert {a.weight_version for a in after} == {"3"}


def test_failed_update_leaves_the_server_paused_with_its_old_version(fleet, controls):
    control = controls[0]
    version = control.weight_version()
    with pytest.raises(EngineRequestError, match="no-such-folder"), control.weight_update("never"):
        control.update_weights_from_disk("/no-such-folder")
    assert control.weight_version() == version
    with control.weight_update("4"):
        control.update_weights_from_disk(str(fleet.model_path))
    assert control.weight_version() == "4"


def test_retracting_requests_over_an_update_is_rejected_when_incorrect(controls):
    if controls[0]._has("/begin_weight_update"):
        pytest.skip("from SGLang 0.5.21 on it is right with the radix cache, too")
    refusal = "disable-radix-cache|install sglang 0.5.19 or later"
    with pytest.raises(EngineError, match=refusal), controls[0].weight_update("5", running="retract"):
        pass


def test_all_requests_are_answered_when_one_of_two_servers_is_killed(fleet, reference):
    victim = fleet.servers[1]

    async def body(client):
        tasks = [asyncio.create_task(client.generate(ids, sampling(400))) for ids in prompts]
        await asyncio.sleep(0.7)
        psutil.Process(victim.pid).children()[0].kill()
        return await asyncio.gather(*tasks)

    prompts = random_prompts(32, seed=3)
    answers = run(fleet, body)
    assert [len(a.token_ids) for a in answers] == [400] * 32
    assert max(largest_error(reference, ids, a) for ids, a in zip(prompts[:4], answers, strict=False)) < 1e-5
    assert victim.poll() == -signal.SIGKILL
    fleet.router.remove_worker(victim.url)
    victim.stop()
    victim.start()
    victim.wait_ready(120)
    fleet.router.add_worker(victim.url)
    fleet.router.wait_ready(2, 30)
