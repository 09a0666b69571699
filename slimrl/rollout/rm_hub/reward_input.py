"""What a reward model reads of a sample: its own tokenizer's ids of a conversation or a text, or the policy's ids.

Promises that nothing is cut off and that no special token is added but those of the reward model's own template (or,
for text, of its own tokenizer). Made and used by the reward model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimrl.data.sample import Sample
from slimrl.rollout.prompts import MESSAGES_KEY


class RewardInput:
    """`tokenizer` is the reward model's, `form` one of `conversation`, `text` and `tokens`."""

    def __init__(self, tokenizer: Any, form: str) -> None:
        self.form = form
        self._tokenizer = tokenizer

    @classmethod
    def open(cls, folder: str, form: str | None, policy_folder: str, *, trust_code: bool) -> RewardInput:
        """Loads the tokenizer; `form` None chooses (see `chosen_form`). Raises ValueError where the form cannot be."""
        from transformers import AutoTokenizer

        if not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise ValueError(f"--rm-model {folder} has no tokenizer: copy it there, it reads with its own")
        own = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_code)
        policy = None if form == "conversation" or own.chat_template and form is None else policy_folder
        if policy is not None:
            policy = AutoTokenizer.from_pretrained(policy_folder, trust_remote_code=trust_code)
        return cls(own, chosen_form(own, policy, form, folder))

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
            ids = self._tokenizer(sample.prompt + sample.response)["input_ids"]
        else:
            text = self._tokenizer.apply_chat_template(conversation(sample), tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ValueError(
                f"sample {sample.index}: its prompt and response are empty, which no reward model can read"
            )
        return ids


def chosen_form(tokenizer: Any, policy_tokenizer: Any | None, form: str | None, folder: str) -> str:
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


def conversation(sample: Sample) -> list[dict[str, Any]]:
    """The messages that the sample answers (a prompt that is text is one of the user) and its response behind them."""
    asked = sample.metadata.get(MESSAGES_KEY, sample.prompt)
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return [*messages, {"role": "assistant", "content": sample.response}]
