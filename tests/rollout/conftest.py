"""A tiny byte-level tokenizer with a chat template, a dataset of sums, and a fake engine client."""

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from slimrl.arguments import Arguments, EvalDataset
from slimrl.engines.protocol import Generation

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if tools %}[{{ tools | length }} tools]{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if quiet %}<think></think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture
def write_rows(tmp_path):
    """Writes rows to a jsonl file and returns its path."""

    def write(rows: list[dict[str, Any]], name: str = "train.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def sums(write_rows):
    """Twelve rows `i+i=` with the sum as label."""
    return write_rows([{"prompt": f"{i}+{i}=", "label": str(2 * i)} for i in range(12)])


@pytest.fixture
def make_args(sums):
    """Arguments for a small rollout over the sums; keywords override."""

    def make(**overrides: Any) -> Arguments:
        values = {
            "prompt_data": sums,
            "input_key": "prompt",
            "label_key": "label",
            "rm_type": "math",
            "rollout_batch_size": 4,
            "over_sampling_batch_size": 4,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 64,
        }
        return Arguments(**{**values, **overrides})

    return make


@pytest.fixture
def make_eval_dataset(sums):
    """An evaluation dataset over the sums; keywords override."""

    def make(**overrides: Any) -> EvalDataset:
        values = dict.fromkeys(field.name for field in dataclasses.fields(EvalDataset))
        values |= {
            "name": "sums",
            "path": sums,
            "n_samples_per_eval_prompt": 1,
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_response_len": 64,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "input_key": "prompt",
            "label_key": "label",
            "metadata_key": "metadata",
            "tool_key": "tools",
            "apply_chat_template": False,
            "apply_chat_template_kwargs": {},
            "rm_type": "math",
            "metadata_overrides": {},
        }
        return EvalDataset(**{**values, **overrides})

    return make


class FakeEngine:
    """An EngineClient that returns `reply(prompt, call number)` after `delay(prompt, call number)` seconds."""

    def __init__(self, tokenizer, reply, delay=None):
        self._tokenizer = tokenizer
        self._reply = reply
        self._delay = delay or (lambda prompt, call: 0.0)
        self.requests: list[tuple[list[int], dict[str, Any]]] = []
        self.aborts = 0
        self.in_flight = 0

    async def generate(self, input_ids, sampling_params, session_id=None):
        call = len(self.requests)
        self.requests.append((list(input_ids), sampling_params))
        prompt = self._tokenizer.decode(input_ids)
        self.in_flight += 1
        try:
            await asyncio.sleep(self._delay(prompt, call))
        finally:
            self.in_flight -= 1
        reply = self._reply(prompt, call)
        if isinstance(reply, Generation):
            return reply
        token_ids = self._tokenizer(reply, add_special_tokens=False)["input_ids"]
        cut = token_ids[: sampling_params["max_new_tokens"]]
        return Generation(
            token_ids=cut,
            log_probs=[-0.5] * len(cut),
            finish_reason="stop" if len(cut) == len(token_ids) else "length",
            weight_version="3",
        )

    async def abort_all(self):
        self.aborts += 1


@pytest.fixture
def fake_engine(tokenizer):
    """Makes a FakeEngine; the default reply is the correct sum in a box."""

    def right(prompt: str, call: int) -> str:
        left, right, _ = prompt.replace("=", "+").split("+")
        return f"\\boxed{{{int(left) + int(right)}}}"

    def make(reply=right, delay=None) -> FakeEngine:
        return FakeEngine(tokenizer, reply, delay)

    return make
