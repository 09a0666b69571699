"""Every engine behind the real router, by the same calls: log-probabilities, aborts, weight updates, OpenAI's API.

vLLM has an environment of its own, whose interpreter is in the variable SLIMRL_VLLM_PYTHON; without it its cases are
skipped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from slimrl.engines.backend import ENGINES, SGLANG, VLLM, backend
from slimrl.engines.protocol import EngineError, EngineRequestError
from slimrl.engines.server_protocol import ServerLaunch
from tests.tools.converting import run_tool

pytestmark = pytest.mark.slow
PYTHON = os.environ.get("SLIMRL_VLLM_PYTHON")
KEY = "a key"
PROMPT = [5, 6, 7, 8]
OPTIONS: dict[str, dict[str, Any]] = {SGLANG: {"disable_radix_cache": True}, VLLM: {"python": PYTHON}}
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}==={% endif %}"
)

MODEL_FLAGS = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention"
    " --num-query-groups 2 --kv-channels 32 --vocab-size 64 --normalization RMSNorm --norm-epsilon 1e-6"
    " --rotary-base 10000 --swiglu --disable-bias-linear --qk-layernorm"
)


def write_model(folder: Path, seed: int) -> Path:
    """A Qwen3 with a head dimension that every engine has on a CPU, and a chat template with a switch."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.sglang.conftest import write_tiny_qwen3

    write_tiny_qwen3(folder)
    torch.manual_seed(seed)
    config = Qwen3Config.from_pretrained(folder)
    config.head_dim = 32
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def reference(folder: Path, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """transformers' log-probability of each token after the prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + token_ids])).logits[0, len(PROMPT) - 1 : -1] / temperature
    return logits.log_softmax(-1)[range(len(token_ids)), token_ids].tolist()


@dataclasses.dataclass
class Served:
    """A server and its router."""

    engine: str
    model: Path
    server: Any
    router: Any
    replicas: int = 1  # of the model in the server

    def control(self) -> Any:
        """The control of the server."""
        return backend(self.engine).control(self.server.url, 100.0, KEY)

    def client(self, work: Callable[[Any], Coroutine[Any, Any, Any]], concurrency: int = 8) -> Any:
        """The result of `work` with an open client."""

        async def run() -> Any:
            client = backend(self.engine).client(
                self.router.url, [self.server.url], concurrency=concurrency, request_timeout_s=100, key=KEY
            )
            async with client:
                return await work(client)

        return asyncio.run(run())

    def load(self, folder: Path, version: str, running: str = "abort") -> None:
        """A weight update from disk."""
        control = self.control()
        control.begin_weight_update(running)
        control.update_weights_from_disk(str(folder), flush_cache=False, weight_version=None)
        control.commit_weight_update(version, running)
        control.continue_()


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """The model as a user has it after training: to torch_dist, and from there to a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("exported")
    origin = write_model(folder / "origin", 0)
    for tool, words in (
        (
            "convert_hf_to_torch_dist.py",
            (*MODEL_FLAGS.split(), "--hf-checkpoint", origin, "--save", folder / "torch_dist"),
        ),
        (
            "convert_torch_dist_to_hf.py",
            ("--input-dir", folder / "torch_dist", "--output-dir", folder / "model", "--origin-hf-dir", origin),
        ),
    ):
        done = run_tool(tool, *words)
        assert done.returncode == 0, done.stderr
    return folder / "model"


SERVERS = {name: (name, 1) for name in sorted(ENGINES)} | {f"{VLLM}, two replicas": (VLLM, 2)}


@pytest.fixture(scope="module", params=SERVERS)
def served(request, tmp_path_factory, exported):
    name, replicas = SERVERS[request.param]
    if name == VLLM and PYTHON is None:
        pytest.skip("SLIMRL_VLLM_PYTHON does not name the interpreter of an environment with vllm")
    folder, engine = tmp_path_factory.mktemp(name), backend(name)
    model = exported
    server = engine.server(
        model,
        log_path=folder / "server.log",
        tensor_parallel_size=replicas,
        options=OPTIONS[name] | ({"data_parallel_size": replicas} if replicas > 1 else {}),
        launch=ServerLaunch(cuda=False),
        key=KEY,
    )
    router = engine.router(log_path=folder / "router.log", key=KEY)
    try:
        router.open()
        server.start()
        server.wait_ready(250)
        router.wait_alive(60)
        router.add_worker(server.url)
        router.wait_ready(1, 60)
        yield Served(name, model, server, router, replicas)
    finally:
        router.stop()
        server.stop()


def sampling(tokens: int, temperature: float = 1.0) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True, "sampling_seed": 3}


async def four_at_once(client: Any) -> list[Any]:
    """Answers from every replica of the server, whose next request goes to the next replica."""
    return await asyncio.gather(*(client.generate(PROMPT, sampling(24)) for _ in range(4)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_through_the_router_match_transformers(served, temperature):
    answer = served.client(lambda client: client.generate(PROMPT, sampling(24, temperature)))
    assert answer.finish_reason == "length" and len(answer.token_ids) == 24
    assert answer.log_probs == pytest.approx(reference(served.model, answer.token_ids, temperature), abs=1e-5)


def test_response_ends_at_a_stop_string_and_keeps_it(served):
    greedy = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True, "no_stop_trim": True}
    whole = served.client(lambda client: client.generate(PROMPT, greedy))
    stop = whole.text[2]
    cut = served.client(lambda client: client.generate(PROMPT, greedy | {"stop": [stop]}))
    assert cut.finish_reason == "stop" and cut.token_ids == whole.token_ids[: whole.text.index(stop) + 1]
    assert cut.text == whole.text[: whole.text.index(stop) + 1]


def test_abort_returns_the_tokens_so_far(served):
    async def work(client):
        tasks = [asyncio.ensure_future(client.generate(PROMPT, sampling(900))) for _ in range(3)]
        await asyncio.sleep(0.5)
        await client.abort_all()
        return await asyncio.gather(*tasks)

    for answer in served.client(work):
        assert answer.finish_reason == "abort" and 0 < len(answer.token_ids) < 900
        assert answer.log_probs == pytest.approx(reference(served.model, answer.token_ids), abs=1e-5)


def test_calls_without_the_key_are_rejected(served):
    with pytest.raises(EngineRequestError, match="401"):
        backend(served.engine).control(served.server.url, 10.0).weight_version()


def test_parameter_that_vllm_does_not_have_is_rejected_by_name(served):
    if served.engine != VLLM:
        pytest.skip("SGLang has all of its own parameters")
    with pytest.raises(EngineRequestError, match="sampling_params has regex"):
        served.client(lambda client: client.generate(PROMPT, {"regex": "a"}))


def test_weights_from_disk_arrive_with_their_version_and_without_stale_kv(served, tmp_path):
    other = write_model(tmp_path / "other", 1)
    before = served.client(lambda client: client.generate(PROMPT, sampling(8)))
    for version, folder in (("7", other), ("8", served.model)):
        served.load(folder, version)
        for answer in served.client(four_at_once):
            assert (answer.weight_version, served.control().weight_version()) == (version, version)
            assert answer.log_probs == pytest.approx(reference(folder, answer.token_ids), abs=1e-5)
    assert before.weight_version == "default"
    assert served.control().load().running == 0 and served.control().scheduler_responds()


def test_requests_in_flight_continue_with_the_new_weights_and_none_of_the_old_kv(served, tmp_path):
    other = write_model(tmp_path / "other", 1)

    async def work(client):
        task = asyncio.ensure_future(client.generate(PROMPT, sampling(400)))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(served.load, other, "9", "retract")
        return await task

    answer = served.client(work)
    (_, change), (version, rest) = answer.version_spans
    assert version == "9" and change > 0 and rest > 0 and change + rest == 400
    old, new = reference(served.model, answer.token_ids), reference(other, answer.token_ids)
    assert answer.log_probs == pytest.approx(old[:change] + new[change:], abs=3e-5)
    assert answer.log_probs[change:] != pytest.approx(old[change:], abs=1e-2)
    served.load(served.model, "10")


def test_failed_update_keeps_the_version_and_is_repaired_by_the_next(served):
    version, control = served.control().weight_version(), served.control()
    with pytest.raises(EngineError, match="no-such-folder"):
        served.load(Path("/no-such-folder"), "never")
    assert control.weight_version() == version
    served.load(served.model, "11")
    answer = served.client(lambda client: client.generate(PROMPT, sampling(8)))
    assert answer.log_probs == pytest.approx(reference(served.model, answer.token_ids), abs=1e-5)


def greedy_text(folder: Path, messages: list[dict[str, str]], *, tokens: int, penalty: float, thinking: bool) -> str:
    """transformers' greedy answer in the chat; `penalty` is taken from the logits of tokens that it already has."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking)
    prompt, answer = tokenizer(text, add_special_tokens=False)["input_ids"], []
    for _ in range(tokens):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, -1]
        logits[sorted(set(answer))] -= penalty
        answer.append(int(logits.argmax()))
    return tokenizer.decode(answer, skip_special_tokens=True)


@pytest.mark.parametrize("thinking", [True, False])
def test_exported_model_answers_the_openai_call_of_the_seeds_as_transformers_does(served, thinking):
    """The call of the tutorial in the seeds, made greedy, so that every engine gives the same tokens."""
    openai = pytest.importorskip("openai")
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "1+1. Let's think step by step and output the final answer within \\boxed{}."},
    ]
    client = openai.OpenAI(api_key=KEY, base_url=f"{served.server.url}/v1")
    answer = client.chat.completions.create(
        model=str(served.model),
        messages=messages,
        temperature=0,
        presence_penalty=1.5,
        max_tokens=24,
        extra_body={"top_k": 20, "chat_template_kwargs": {"enable_thinking": thinking}, "ignore_eos": True},
    )
    expected = greedy_text(served.model, messages, tokens=24, penalty=1.5, thinking=thinking)
    assert answer.usage.completion_tokens == 24
    assert answer.choices[0].message.content == expected
    other = greedy_text(served.model, messages, tokens=24, penalty=1.5, thinking=not thinking)
    assert other != expected, "the switch changes nothing: the test cannot tell"


def test_server_can_be_used_as_an_external_one_unless_it_serves_another_model(served, tmp_path):
    address, inspect = served.server.url.removeprefix("http://"), backend(served.engine).inspect
    server = inspect(address, str(served.model), key=KEY)
    assert server.tensor_parallel_size == served.replicas and not server.was_replaced()
    other = write_model(tmp_path / "other", 0)
    config = json.loads((other / "config.json").read_text()) | {"hidden_act": "gelu"}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="differs from that of --hf-checkpoint .* in hidden_act: serve the trained"):
        inspect(address, str(other), key=KEY)
    with pytest.raises(EngineError, match="requires another key"):
        inspect(address, str(served.model), key="another")
