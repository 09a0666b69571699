"""What a reward model reads of a sample: its own tokenizer's ids of a conversation or a text, or the policy's ids.

Promises that nothing is cut off but the policy's marks for the end of its turn (a template sets its own), and that no
special token is added but those of the reward model's own template (or,
for text, of its own tokenizer). Made and used by the reward model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimrl.arguments.reward_model import TOKENIZER_FILES
from slimrl.data.sample import Sample
from slimrl.rollout.prompts import MESSAGES_KEY


class RewardInput:
    """`tokenizer` is the reward model's, `form` one of `conversation`, `text` and `tokens`.

    `endings` are the policy's special tokens, which may stand at the end of a response's text.
    """

    def __init__(self, tokenizer: Any, form: str, endings: Sequence[str]) -> None:
        self.form = form
        self._tokenizer = tokenizer
        self._endings = tuple(endings)

    @classmethod
    def open(cls, folder: str, form: str | None, policy_folder: str, *, trust: tuple[bool, bool]) -> RewardInput:
        """Loads the tokenizer; `form` None chooses (see `chosen_form`). Raises ValueError where the form cannot be.

        `trust` says whether code of the reward model's and of the policy's tokenizer may be run.
        """
        from transformers import AutoTokenizer

        if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
            raise ValueError(f"--rm-model {folder} has no tokenizer: copy it there, it reads with its own")
        own = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust[0])
        policy = AutoTokenizer.from_pretrained(policy_folder, trust_remote_code=trust[1])
        return cls(own, chosen_form(own, policy, form, folder), policy.all_special_tokens)

    def token_ids(self, sample: Sample) -> list[int]:
        """The ids that are scored; the score is that of the last one. Raises ValueError where there is none."""
        if self.form == "tokens":
            ids = sample.tokens
        elif self.form == "text":
            if not isinstance(sample.prompt, str):
                raise ValueError(
                    f"sample {sample.index}: its prompt is a list of messages, which --rm-input text cannot join to a"
                    " response: give --rm-input conversation, or --apply-chat-template"
                )
            ids = self._tokenizer(sample.prompt + self.response(sample))["input_ids"]
        else:
            messages = [*asked(sample), {"role": "assistant", "content": self.response(sample)}]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ValueError(
                f"sample {sample.index}: its prompt and response are empty, which no reward model can read"
            )
        return ids

    def response(self, sample: Sample) -> str:
        """The response's text without the special tokens at its end."""
        text = sample.response
        while text.endswith(self._endings) and self._endings:
            text = text[: -max(len(one) for one in self._endings if text.endswith(one))]
        return text


def chosen_form(tokenizer: Any, policy_tokenizer: Any, form: str | None, folder: str) -> str:
    """The form asked for, or else the conversation where the model has a chat template, tokens where they mean the same
    as the policy's, and text otherwise.

    Raises ValueError where the form asked for cannot be had.
    """
    if form == "conversation" and not tokenizer.chat_template:
        raise ValueError(
            f"--rm-input conversation: the tokenizer of --rm-model {folder} has no chat template: give one, or text"
        )
    if form in ("conversation", "text"):
        return form
    if form is None and tokenizer.chat_template:
        return "conversation"
    same = tokenizer.get_vocab() == policy_tokenizer.get_vocab()
    if form == "tokens" and not same:
        raise ValueError(
            f"--rm-input tokens: the tokenizer of --rm-model {folder} is not the policy's, the same ids mean other"
            " tokens there: leave it out, or give conversation or text"
        )
    return "tokens" if same else "text"


def asked(sample: Sample) -> list[dict[str, Any]]:
    """The messages that the sample answers; a prompt that is text is one of the user."""
    messages = sample.metadata.get(MESSAGES_KEY, sample.prompt)
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
