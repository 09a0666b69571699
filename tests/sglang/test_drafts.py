"""A server with a draft model beside one without: equal tokens, before and after an update that skips the draft."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from transformers import AutoModelForCausalLM

from slimrl.engines.backend import SGLANG, backend
from slimrl.engines.protocol import EngineUnsupportedError
from slimrl.engines.sglang.client import RouterClient
from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.server import ServerProcess
from tests.sglang.conftest import write_tiny_qwen3
from tests.sglang.draft_chains import CHAIN, count_drafts
from tests.weights.real_servers import running

PROMPTS = [[3 + number, *range(10, 16 + number)] for number in range(5)]
TOKENS = 40
DETERMINISTIC = {"enable_deterministic_inference": True}


def nearby(model, amount: float, seed: int):
    """A copy of the model with noise on its weights, so that it often agrees with it."""
    generator = torch.Generator().manual_seed(seed)
    copied = type(model)(model.config)
    copied.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(amount * torch.randn(parameter.shape, generator=generator))
    return copied.eval()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Its folder, the model, and the draft model."""
    folder = write_tiny_qwen3(tmp_path_factory.mktemp("policy"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return folder, model, nearby(model, 0.01, seed=1)


@pytest.fixture(scope="module")
def servers(policy, tmp_path_factory):
    """URLs of a server without a draft model and of one with."""
    folder, logs = policy[0], tmp_path_factory.mktemp("logs")
    draft = write_tiny_qwen3(tmp_path_factory.mktemp("draft"))
    policy[2].save_pretrained(draft)
    drafting = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft)}
    made = [
        ServerProcess(folder, log_path=logs / f"{number}.log", options=DETERMINISTIC | more)
        for number, more in enumerate(({}, drafting))
    ]
    with running(made) as urls:
        yield urls


def test_trees_of_drafts_on_a_cpu_are_refused_before_anything_starts():
    engine = backend(SGLANG)
    with pytest.raises(EngineUnsupportedError, match=r"^--sglang-speculative-eagle-topk 4 .* on a CPU: give 1"):
        engine.check_machine("/model", cuda=False, releases_memory=False, draft_branches=4)
    engine.check_machine("/model", cuda=False, releases_memory=False, draft_branches=1)
    engine.check_machine("/model", cuda=True, releases_memory=False, draft_branches=4)


def responses(url: str, temperature: float, others: Sequence[dict[str, float]] = (), **more: float):
    """The generations of all prompts, each with a seed of its own, and the metrics of the requests.

    Requests with the parameters `others` are sent first.
    """

    async def ask():
        async with RouterClient(url, [url], concurrency=8, request_timeout_s=60) as client:
            wanted = {"max_new_tokens": TOKENS, "temperature": temperature, "ignore_eos": True, **more}
            asked = [(PROMPTS[0], wanted | other | {"sampling_seed": 9}) for other in others]
            asked += [(prompt, wanted | {"sampling_seed": number}) for number, prompt in enumerate(PROMPTS)]
            found = await asyncio.gather(*(client.generate(prompt, params) for prompt, params in asked))
            return found[len(others) :], client.requests.take(len(asked))

    return asyncio.run(ask())


def greedy(model, prompt: list[int], tokens: int = TOKENS) -> list[int]:
    with torch.no_grad():
        found = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return found[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_samples_do_not_depend_on_requests_of_other_kinds_in_their_batch(servers):
    """Nor in the server with drafts: a greedy request and one with a top-k run beside them."""
    others = [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 3}, {"temperature": 0.5, "top_p": 0.7}]
    others = [one | {"max_new_tokens": 3 * TOKENS} for one in others]
    for url in servers:
        alone, _ = responses(url, 0.9)
        ServerControl(url).flush_cache()
        beside, _ = responses(url, 0.9, others=others)
        assert [one.token_ids for one in beside] == [one.token_ids for one in alone]


def share_of_right_drafts(draft, model) -> float:
    """Of greedy responses of `model` to all prompts; between 0 and 1."""
    longer = [greedy(model, prompt, TOKENS + CHAIN) for prompt in PROMPTS]
    counts = [count_drafts(draft, prompt, one, TOKENS) for prompt, one in zip(PROMPTS, longer, strict=True)]
    right, proposed = (sum(numbers) for numbers in zip(*counts, strict=True))
    assert 0 < right < proposed
    return right / proposed


@pytest.mark.slow
def test_both_decode_greedily_what_transformers_does(servers, policy):
    ServerControl(servers[1]).flush_cache()  # a prompt's cache has the first token of an earlier response to it
    expected = [greedy(policy[1], prompt) for prompt in PROMPTS]
    (without, _), (drafted, metrics) = (responses(url, 0.0) for url in servers)
    assert [one.token_ids for one in without] == [one.token_ids for one in drafted] == expected
    assert metrics["rollout/spec_accept_rate"] == share_of_right_drafts(policy[2], policy[1])
    assert metrics["rollout/spec_accept_length"] > 1.3


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"top_p": 0.8}, {"top_k": 5}], ids=["whole", "top-p", "top-k"])
def test_both_sample_the_same_tokens_with_the_same_log_probs(servers, more):
    (without, _), (drafted, metrics) = (responses(url, 0.9, **more) for url in servers)
    assert [one.token_ids for one in without] == [one.token_ids for one in drafted]
    assert metrics["rollout/spec_accept_rate"] > 0.05
    if not more:  # with drafts, the server reports log-probabilities of the whole distribution
        for one, other in zip(without, drafted, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def checksums(url: str, *, draft: bool) -> dict[str, str]:
    (rank,) = ServerControl(url)._post("/weights_checker", {"action": "checksum"})["ranks"]
    return {name: one for name, one in rank["checksums"].items() if name.startswith("draft.") is draft}


@pytest.mark.slow
def test_weight_update_reaches_the_policy_and_skips_its_draft_model(servers, policy):
    updated = nearby(policy[1], 0.02, seed=2)
    _, url = servers
    model, draft = checksums(url, draft=False), checksums(url, draft=True)
    assert model and draft
    torch.multiprocessing.set_sharing_strategy("file_system")
    control, buffer = ServerControl(url, timeout_s=60), io.BytesIO()
    named = [(name, tensor) for name, tensor in updated.state_dict().items() if name != "lm_head.weight"]
    ForkingPickler(buffer).dump(named)
    with control.weight_update("1"):
        control.update_weights_from_tensor([base64.b64encode(buffer.getvalue()).decode()])
    assert checksums(url, draft=True) == draft
    assert not any(one == model[name] for name, one in checksums(url, draft=False).items())
    found, metrics = responses(url, 0.0)
    assert [one.token_ids for one in found] == [greedy(updated, prompt) for prompt in PROMPTS]
    assert {one.weight_version for one in found} == {"1"}
    assert metrics["rollout/spec_accept_rate"] == share_of_right_drafts(policy[2], updated)
