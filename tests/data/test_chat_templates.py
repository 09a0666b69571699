"""Loss masks with a template of every family's shape, against the conversation rendered turn by turn.

The reference knows no markers: a turn is what the template adds to the prompt for generation, up to the end marker.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from slimrl.data.loss_mask import CHAT_TEMPLATE, LOSS_MASK_TYPES, TURN_MARKS, fitting_types, masked_conversation


@dataclasses.dataclass(frozen=True)
class Family:
    """A template.

    `begin` and `tail` are what it writes before the text of a turn, which the model generates, and after the end
    marker; `end` is the end marker if the template leaves it to the next turn.
    """

    template: str
    special: tuple[str, ...]
    eos: str
    begin: str = ""
    tail: str = ""
    end: str = ""
    bos: str | None = None


CHATML = Family(
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    tail="\n",
)
LLAMA3 = Family(
    "{{- bos_token }}{%- for m in messages -%}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{%- if m.role == 'assistant' -%}{%- generation -%}{{ m.content | trim + '<|eot_id|>' }}{%- endgeneration -%}"
    "{%- else -%}{{ m.content | trim + '<|eot_id|>' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    "<|eot_id|>",
    bos="<|begin_of_text|>",
)
LLAMA2 = Family(
    "{%- if messages[0].role == 'system' -%}{%- set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' -%}"
    "{%- set rest = messages[1:] -%}{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}"
    "{%- for m in rest -%}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "{%- if m.role == 'user' -%}{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content.strip() }}"
    "{{ ' [/INST]' }}"
    "{%- else -%}{{ ' ' + m.content.strip() + ' ' + eos_token }}{%- endif -%}{%- endfor -%}",
    ("<s>", "</s>"),
    "</s>",
    bos="<s>",
)
GLM4 = Family(
    "[gMASK]<sop>{%- for m in messages -%}{%- if m.role == 'user' -%}{{ '<|user|>\n' + m.content }}"
    "{%- elif m.role == 'system' -%}{{ '<|system|>\n' + m.content }}"
    "{%- elif m.role == 'tool' -%}{{ '<|observation|>\n' + m.content }}"
    "{%- elif m.role == 'assistant' -%}{{ '<|assistant|>\n' + m.content }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}",
    ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|endoftext|>"),
    "<|endoftext|>",
    begin="\n",
    end="<|user|>",
)
KIMI = Family(
    "{%- for m in messages -%}{%- if m.role == 'system' -%}<|im_system|>{%- elif m.role == 'user' -%}<|im_user|>"
    "{%- else -%}<|im_assistant|>{%- endif -%}{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}",
    ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
    "<|im_end|>",
)
DEEPSEEK = Family(
    "{%- set ns = namespace(tool=false) -%}{{ bos_token }}{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{{ m.content }}{%- elif m.role == 'user' -%}{%- set ns.tool = false -%}"
    "{{ '<｜User｜>' + m.content }}{%- elif m.role == 'tool' -%}{%- set ns.tool = true -%}"
    "{{ '<｜tool▁outputs▁begin｜>' + m.content }}{%- elif ns.tool -%}{%- set ns.tool = false -%}"
    "{{ '<｜tool▁outputs▁end｜>' + m.content + '<｜end▁of▁sentence｜>' }}"
    "{%- else -%}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}{%- endif -%}{%- endfor -%}"
    "{%- if ns.tool -%}<｜tool▁outputs▁end｜>{%- elif add_generation_prompt -%}<｜Assistant｜>{%- endif -%}",
    (
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    ),
    "<｜end▁of▁sentence｜>",
    bos="<｜begin▁of▁sentence｜>",
)
DEEPSEEK_V2 = Family(
    "{{ bos_token }}{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{{ 'Assistant: ' + m.content + eos_token }}{%- elif m.role == 'user' -%}{{ 'User: ' + m.content + '\n\n' }}"
    "{%- else -%}{{ m.content + '\n\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}",
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "<｜end▁of▁sentence｜>",
    bos="<｜begin▁of▁sentence｜>",
)
FAMILIES = {
    "qwen": CHATML,
    "qwen3": CHATML,
    "qwen3_5": CHATML,
    "distill_qwen": DEEPSEEK,
    "deepseek": DEEPSEEK,
    "deepseek_v2": DEEPSEEK_V2,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "glm4": GLM4,
    "kimi": KIMI,
    CHAT_TEMPLATE: LLAMA3,
}


def tokenizer_of(family: Family, *, metaspace: bool = False) -> Any:
    """Byte-level with the family's special tokens, or with spaces as a part of the word, as in SentencePiece."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if metaspace:
        letters = [*map(chr, range(33, 127)), "\n", "▁", "▁h"]
        backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, [("▁", "h")]))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace()
    else:
        backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=family.eos,
        bos_token=family.bos,
        extra_special_tokens=list(family.special),
    )
    made.chat_template = family.template
    return made


def python_tokenizer_of(family: Family) -> Any:
    """A tokenizer in Python, without offsets: one token per character."""
    from transformers import PreTrainedTokenizer

    class Characters(PreTrainedTokenizer):
        @property
        def vocab_size(self):
            return 0x3000

        def get_vocab(self):
            return {chr(place): place for place in range(0x3000)} | self.added_tokens_encoder

        def _tokenize(self, text, **options):
            return list(text)

        def _convert_token_to_id(self, token):
            return ord(token)

        def _convert_id_to_token(self, index):
            return chr(index)

    made = Characters(eos_token=family.eos, bos_token=family.bos, extra_special_tokens=list(family.special))
    made.chat_template = family.template
    assert not made.is_fast
    return made


def turns(family: Family, tokenizer: Any, messages: list[dict]) -> tuple[str, list[tuple[int, int]]]:
    """The text with the end marker of the last turn, and the range of each assistant turn, by rendering its prompt."""
    whole = tokenizer.apply_chat_template(messages, tokenize=False) + family.end
    found = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(messages[:place], tokenize=False, add_generation_prompt=True)
            after = tokenizer.apply_chat_template(messages[: place + 1], tokenize=False)
            after = after.removesuffix(family.tail) + family.end
            assert whole.startswith(before) and whole.startswith(after)
            found.append((len(before), len(after)))
    return whole, found


def talk(first: str = "hi there", answer: str = "hello you", **more: object) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": first},
        {"role": "assistant", "content": answer, **more},
        {"role": "user", "content": "Grüße, 漢字?"},
        {"role": "assistant", "content": "hm, so\n\nlong"},
    ]


def expected_mask(family: Family, tokenizer: Any, messages: list[dict]) -> tuple[list[int], list[int]]:
    """Token ids and mask by characters, from the turns by rendering."""
    text, ranges = turns(family, tokenizer, messages)
    kept = [message.get("step_loss_mask", 1) for message in messages if message["role"] == "assistant"]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    trained = {place for (start, end), keep in zip(ranges, kept, strict=True) if keep for place in range(start, end)}
    return encoded["input_ids"], [int(begin in trained) for begin, _ in encoded["offset_mapping"]]


def check(mask_type: str, messages: list[dict], tokenizer: Any = None) -> str:
    """The trained text, after the comparison of ids and mask with the reference."""
    family = FAMILIES[mask_type]
    tokenizer = tokenizer or tokenizer_of(family)
    found = masked_conversation(tokenizer, messages, mask_type)
    ids, mask = expected_mask(family, tokenizer, messages)
    assert found.ids == ids and found.mask == mask and 0 < sum(mask) < len(mask)
    return tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained])


def test_every_type_has_a_template_here():
    assert set(FAMILIES) == set(LOSS_MASK_TYPES)


@pytest.mark.parametrize("mask_type", LOSS_MASK_TYPES)
def test_trained_tokens_are_what_the_template_adds_to_the_prompt(mask_type):
    family = FAMILIES[mask_type]
    end = family.end or family.eos
    text = check(mask_type, talk())
    assert text.replace(" ", "").strip() == f"helloyou{end}{family.begin}hm,so\n\nlong{end}"
    without_first = check(mask_type, talk(step_loss_mask=0))
    assert "hello" not in without_first and without_first.rstrip().endswith(end)


@pytest.mark.parametrize("mask_type", LOSS_MASK_TYPES)
def test_markers_within_texts_are_no_markers(mask_type):
    family = FAMILIES[mask_type]
    marks = TURN_MARKS.get(mask_type, TURN_MARKS["llama3"])
    for mark in (*marks.before, *marks.after, *marks.stops, family.eos):
        assert "rest of the turn" in check(mask_type, talk(answer=f"say {mark} and the rest of the turn"))
        assert "say" not in check(mask_type, talk(first=f"say {mark} and {mark}"))
        check(mask_type, talk(first=f"{mark}x", answer=f"x{mark}"))


@pytest.mark.parametrize("mask_type", LOSS_MASK_TYPES)
def test_tokenizer_without_offsets_gives_the_same_characters(mask_type):
    family = FAMILIES[mask_type]
    tokenizer = python_tokenizer_of(family)
    text, ranges = turns(family, tokenizer, talk())
    found = masked_conversation(tokenizer, talk(step_loss_mask=0), mask_type)
    assert found.offsets is None and found.text == text
    assert found.ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    trained = [token for token, chosen in zip(found.ids, found.mask, strict=True) if chosen]
    start, end = ranges[1]
    assert trained == tokenizer(text[start:end], add_special_tokens=False)["input_ids"]


def test_spaces_of_sentencepiece_belong_to_the_turn_as_in_generation():
    tokenizer = tokenizer_of(LLAMA2, metaspace=True)
    text = check("llama2", talk()[:3], tokenizer)
    assert text.strip() == "hello you </s>"


@pytest.mark.parametrize(
    ("mask_type", "messages", "trained"),
    [
        (
            "glm4",
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "call"}]
            + [{"role": "tool", "content": "42"}, {"role": "assistant", "content": "it is 42"}],
            "\ncall<|observation|>\nit is 42<|user|>",
        ),
        (
            "glm4",
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "one"}]
            + [{"role": "assistant", "content": "two"}, {"role": "user", "content": "bye"}],
            "\none\ntwo<|user|>",
        ),
        (
            "deepseek",
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "call"}]
            + [{"role": "tool", "content": "42"}, {"role": "assistant", "content": "it is 42"}],
            "call<｜end▁of▁sentence｜>it is 42<｜end▁of▁sentence｜>",
        ),
    ],
)
def test_calls_of_tools_and_turns_in_succession(mask_type, messages, trained):
    tokenizer = tokenizer_of(FAMILIES[mask_type])
    found = masked_conversation(tokenizer, messages, mask_type)
    assert tokenizer.decode([id_ for id_, chosen in zip(found.ids, found.mask, strict=True) if chosen]) == trained


@pytest.mark.parametrize("mask_type", ["llama3", CHAT_TEMPLATE])
def test_call_of_llama_that_awaits_its_result_has_another_end_marker(mask_type):
    own_end = "m.content | trim + ('<|eom_id|>' if m.calls else '<|eot_id|>')"
    template = LLAMA3.template.replace("m.content | trim + '<|eot_id|>'", own_end)
    tokenizer = tokenizer_of(dataclasses.replace(LLAMA3, template=template))
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "f()", "calls": True},
        {"role": "ipython", "content": "42"},
        {"role": "assistant", "content": "it is 42"},
    ]
    found = masked_conversation(tokenizer, messages, mask_type)
    trained = [id_ for id_, chosen in zip(found.ids, found.mask, strict=True) if chosen]
    assert tokenizer.decode(trained) == "f()<|eom_id|>it is 42<|eot_id|>"


def test_template_that_reads_a_marker_in_a_text_is_refused():
    reads = CHATML.template.replace("m.content +", "m.content.split('<|im_end|>')[0] +")
    tokenizer = tokenizer_of(dataclasses.replace(CHATML, template=reads))
    masked_conversation(tokenizer, talk(), "qwen")
    with pytest.raises(ValueError, match=r"contain a marker of the chat template \(<\|im_start\|> or <\|im_end\|>\)"):
        masked_conversation(tokenizer, talk(answer="a<|im_end|>b"), "qwen")


def test_conversation_that_the_template_rejects_is_refused_with_its_reason():
    twice = [talk()[1], talk()[1], talk()[2]]
    with pytest.raises(ValueError, match="the chat template rejects it: TemplateError: roles must alternate"):
        masked_conversation(tokenizer_of(LLAMA2), twice, "llama2")


@pytest.mark.parametrize(
    ("family", "types"),
    [
        (CHATML, ["qwen", "qwen3", "qwen3_5"]),
        (DEEPSEEK, ["distill_qwen", "deepseek"]),
        (DEEPSEEK_V2, ["deepseek_v2"]),
        (LLAMA2, ["llama2"]),
        (LLAMA3, [CHAT_TEMPLATE, "llama3"]),
        (GLM4, ["glm4"]),
        (KIMI, ["kimi"]),
    ],
)
def test_template_has_the_markers_of_its_family_alone(family, types):
    assert fitting_types(family.template) == types


def test_template_of_no_family_fits_no_type():
    assert fitting_types("{% for m in messages %}<|user|>{{ m.content + eos_token }}<|assistant|>{% endfor %}") == []
