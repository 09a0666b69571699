"""What functions written for slime call on a sample, beyond the fields that both have.

Promises the bookkeeping of `slimrl.rollout.turns`: after every call masks, log-probabilities and version spans have one
entry per response token. `Sample` inherits it, so that there is one class for both kinds of functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slimrl.data import version_spans

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from slimrl.data.sample import Sample

# slime's fields that nothing reads here, and what to do instead of setting them
NOT_SERVED = {
    "generate_function_path": "give the evaluation set a custom_generate_function_path (--eval-config)",
    "mopd_teacher_log_probs": "distillation from teachers is not served",
    "multimodal_inputs": "images, videos and sounds are not served: leave it None",
    "multimodal_train_inputs": "images, videos and sounds are not served: leave it None",
    "rollout_routed_experts": "replay of the routing is not served: leave it None",
    "teacher_log_probs": "distillation from teachers is not served",
    "train_metadata": "put it into metadata, which --rollout-sample-filter-path and reward functions see",
}
_STATUS_BY_FINISH = {"stop": "completed", "length": "truncated", "abort": "aborted"}


class SlimeSample:
    """The methods; `self` is always a `Sample`. The fields of `NOT_SERVED` read as None."""

    def __getattr__(self, name: str) -> None:
        if name in NOT_SERVED:
            return None
        raise AttributeError(
            f"a Sample has no {name}: its fields are those of slimrl.data.sample, and what is your own belongs into"
            " metadata",
            name=name,
            obj=self,
        )

    @property
    def effective_response_length(self: Sample) -> int:
        """Response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self: Sample, args: Any) -> float:
        """The reward that counts, by `args.reward_key` where it is a dict. Raises ValueError as `reward_value` does."""
        return self.reward_value(args.reward_key)

    def append_response_tokens(
        self: Sample,
        args: Any = None,
        *,
        tokens: Iterable[int] | None = None,
        log_probs: Iterable[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Adds tokens of the model (`trainable`, with a log-probability each), or of a tool (without), to the response.

        `text` is added to the response's text, and of `meta_info` what `update_from_meta_info` takes, the status
        unless `update_terminal_info` is False. The list `loss_mask` is extended in place. Raises ValueError where
        log-probabilities are missing, superfluous or of another number.
        """
        new_tokens = [int(token) for token in tokens or ()]
        values = None if log_probs is None else [float(value) for value in log_probs]
        if new_tokens and trainable and values is None:
            raise ValueError(f"{len(new_tokens)} tokens to train on came without log_probs: give one for each")
        if new_tokens and not trainable and values is not None:
            raise ValueError("tokens that are not trained on came with log_probs: leave them out, nothing reads them")
        values = [0.0] * len(new_tokens) if values is None else values
        if len(values) != len(new_tokens):
            raise ValueError(f"{len(new_tokens)} tokens came with {len(values)} log_probs: give one for each")
        before = self.response_length
        spans = version_spans.fitted(self.version_spans, before)
        version = str((meta_info or {}).get("weight_version", "")) if trainable else version_spans.NO_VERSION
        version_spans.add(spans, version, len(new_tokens))
        self.version_spans = spans
        self.tokens = [*self.tokens, *new_tokens]
        self.response_length = before + len(new_tokens)
        if self.loss_mask is None:
            self.loss_mask = [1] * before
        self.loss_mask += [int(trainable)] * len(new_tokens)
        self.rollout_log_probs = [*(self.rollout_log_probs or [0.0] * before), *values]
        self.response += text or ""
        if meta_info is not None:
            status = self.status
            self.update_from_meta_info(args, meta_info)
            if not update_terminal_info:
                self.status = status

    def update_from_meta_info(self: Sample, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Takes the weight version and the status from an engine's `meta_info`.

        Caches and drafts are counted where the requests are (rollout/prefix_cache_hit_rate and others), not per sample.
        """
        if "weight_version" in meta_info:
            self.weight_versions.append(str(meta_info["weight_version"]))
        finish = meta_info["finish_reason"]["type"]
        if finish in _STATUS_BY_FINISH:
            self.status = self.Status(_STATUS_BY_FINISH[finish])


def unserved_field(sample: Sample) -> str | None:
    """What is wrong with a field that nothing here reads and that somebody filled; None where there is none."""
    for name in NOT_SERVED.keys() & vars(sample).keys():
        if getattr(sample, name) is not None:
            return f"it has {name}, which nothing here reads: {NOT_SERVED[name]}"
    return None
