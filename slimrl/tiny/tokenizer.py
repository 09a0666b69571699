"""The tokenizer: lossless byte-level BPE with ChatML as chat template.

It is built like Qwen's, at a hundredth of the size: 256 bytes, one token per digit, and just enough merges that the
words of the chat template and ``\\boxed{`` are one token each. Its size is deliberately not a multiple of 128, so that
tests cover a padded vocabulary.
"""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
WHOLE_WORDS = ("\\boxed{", "system", "user", "assistant")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def _merges(word: str) -> list[tuple[str, str]]:
    """The merges that build ``word`` from the left, one character at a time."""
    return [(word[:end], word[end]) for end in range(1, len(word))]


def build_tokenizer(*, max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer of every tiny model; ``max_length`` is the model's context in tokens."""
    merges = [merge for word in WHOLE_WORDS for merge in _merges(word)]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}|[^\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
