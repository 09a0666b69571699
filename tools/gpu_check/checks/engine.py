"""A real SGLang server and a real trainer on one device: weights, log-probabilities, memory.

The device and all sizes are parameters: the same code runs on the CPU at toy size, without offload.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from slimrl.algorithms.batch_invariant import operators
from slimrl.arguments import Arguments
from slimrl.engines.backend import SGLANG, backend
from slimrl.engines.http import call, new_key
from slimrl.engines.server_protocol import CUDA_GRAPHS, KV_CACHE, WEIGHTS, ServerLaunch
from slimrl.models.families import family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.update.topology import EngineEndpoint
from slimrl.weights.update.weight_updater import ModelSource, WeightUpdater, WeightUpdateReport
from tools.gpu_check.checks.memory import free_bytes, timed
from tools.gpu_check.checks.training import require_device
from tools.gpu_check.models import RandomTrainer, arguments, hf_config, rollout_of, save_config, scheduled
from tools.gpu_check.record import Record

GB, GIB = 1e9, 2**30
READY_S, ANSWER_S = 600.0, 300.0
FLAGS = ("--lr", "1e-6", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096", "--use-distributed-optimizer")
OPTIONS = {"skip_tokenizer_init": True, "load_format": "dummy", "mem_fraction_static": 0.3, "max_running_requests": 16}
RELEASED = 0.9  # of the weights' bytes; the rest may be small tensors outside the releasable pool


def server(
    record: Record,
    device: str,
    model: str,
    changes: Sequence[str],
    bf16: bool,
    samples: int = 16,
    prompt_length: int = 64,
    response_length: int = 128,
) -> None:
    """`model` (of scripts/models, with the flags `changes`), with the server's, then the trainer's random weights."""
    require_device(device)
    args = arguments(model, *FLAGS, *(["--bf16"] if bf16 else []), *changes)
    with tempfile.TemporaryDirectory() as folder:
        free = free_bytes(device)
        options = OPTIONS | {"dtype": "bfloat16" if bf16 else "float32"}
        with Serving(save_config(args, Path(folder, "model")), Path(folder, "log"), options) as serving:
            record.figure("ready after", serving.seconds, "s")
            used = free - free_bytes(device)
            trainer = RandomTrainer(args)
            with Updates(trainer, serving) as updates:
                weight_update_figures(record, [updates.update_weights(version) for version in ("1", "2")])
                tokens, log_probs = sample(serving, args, samples, prompt_length, response_length)
                difference_figures(record, trainer, tokens, prompt_length, log_probs)
                memory_figures(record, serving, updates, device, used)
            trainer.close()


def exact(
    record: Record,
    device: str,
    model: str,
    changes: Sequence[str],
    bf16: bool,
    samples: int = 16,
    prompt_length: int = 64,
    response_length: int = 128,
) -> None:
    """As `server`, with --true-on-policy-mode: the log-probabilities before and after an optimizer step are equal."""
    require_device(device)
    operator_figures(record, device)
    precision = "--bf16" if bf16 else "--no-bf16"
    args = arguments(model, *FLAGS, "--true-on-policy-mode", "--deterministic-mode", precision, *changes)
    with tempfile.TemporaryDirectory() as folder:
        options = OPTIONS | {"dtype": "bfloat16" if bf16 else "float32", "enable_deterministic_inference": True}
        saved = save_config(args, Path(folder, "model"))
        with Serving(saved, Path(folder, "log"), options, batch_invariant=True) as serving:
            trainer = RandomTrainer(args)
            with Updates(trainer, serving) as updates:
                for version, weights in (("1", "random weights"), ("2", "weights after a step")):
                    updates.update_weights(version)
                    tokens, log_probs = sample(serving, args, samples, prompt_length, response_length)
                    rollout = scheduled(args, rollout_of(tokens, prompt_length, log_probs))
                    (metrics,) = trainer.train(0, rollout)
                    largest = metrics["train_rollout_logprob_abs_diff_max"]
                    record.figure(f"largest difference, {weights}", largest, at_most=0.0)
                    record.figure("gradient norm", metrics["grad_norm"])
            record.figure("tokens compared", 2 * samples * response_length)
            trainer.close()


def operator_figures(record: Record, device: str, tokens: int = 300, size: int = 128) -> None:
    """The largest difference of a row's result alone and among others, of each operator that adds."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    weight, scale = normal(1000, size), normal(size)
    logits, (query, key, value) = normal(tokens, 5000).float(), (normal(tokens, heads, size) for heads in (4, 2, 2))
    operations: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {
        "product": (normal(tokens, size), lambda x: operators.output_logits(x, weight)),
        "norm": (normal(tokens, size), lambda x: operators.rms_norm(x, scale, 1e-6)),
        "log-softmax": (logits, lambda x: operators.log_softmax(x, 0.7)[0]),
    }
    for name, (rows, operator) in operations.items():
        alone = torch.cat([operator(row) for row in rows.split(1)])
        record.figure(f"{name}, alone and among others", float((alone - operator(rows)).abs().max()), at_most=0.0)
    parts = zip(*(x.split(tokens // 3) for x in (query, key, value)), strict=True)
    lone = torch.cat([operators.attend_packed(q, k, v, [len(q)], 0.1) for q, k, v in parts])
    packed = operators.attend_packed(query, key, value, [tokens // 3] * 3, 0.1)
    record.figure("attention, alone and packed", float((lone - packed).abs().max()), at_most=0.0)


class Serving:
    """A server while the block runs; `seconds` until it answered. Prints its last log lines if the block fails."""

    def __init__(self, model: Path, log: Path, options: Mapping[str, Any], *, batch_invariant: bool = False) -> None:
        launch = ServerLaunch(
            cuda=torch.cuda.is_available(), memory_saver=not batch_invariant, batch_invariant=batch_invariant
        )
        self.key = new_key()
        self._server = backend(SGLANG).server(model, log_path=log, options=options, launch=launch, key=self.key)

    def __enter__(self) -> Serving:
        self._server.start()
        try:
            self.seconds, _ = timed("cpu", lambda: self._server.wait_ready(READY_S))
        except BaseException:
            self._server.stop()
            raise
        self.url = self._server.url
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if kind is not None:
            print("the server's last lines:", self._server.last_log_lines(40), sep="\n", flush=True)
        self._server.stop()


class Updates:
    """Sends the trainer's weights to the server through shared memory."""

    def __init__(self, trainer: RandomTrainer, serving: Serving) -> None:
        self._trainer = trainer
        source = ModelSource(ModelSpec.from_args(trainer.args), family_for(hf_config(trainer.args)), trainer.parallel)
        endpoint = EngineEndpoint(serving.url, [0], key=serving.key)
        self._updater = WeightUpdater.colocated(source, [endpoint], timeout_s=ANSWER_S)

    def __enter__(self) -> Updates:
        return self

    def __exit__(self, *_: object) -> None:
        self._updater.close()

    def update_weights(self, version: str) -> WeightUpdateReport:
        """Raises WeightSyncError if a tensor in the server differs from the trainer's."""
        return self._updater.update_weights(self._trainer.stages, version=version, check_equal=True)


def weight_update_figures(record: Record, reports: Sequence[WeightUpdateReport]) -> None:
    """Figures of the first weight update, and of a later one, which reuses memory and connections."""
    for name, report in zip(("first update", "later update"), reports, strict=True):
        seconds = report.seconds - report.check_seconds
        record.figure(name, seconds, "s")
    record.figure("later update, speed", reports[-1].bytes / seconds / GB, "GB/s")
    record.figure("attempts of an update", max(report.attempts for report in reports), at_most=1)


def sample(
    serving: Serving, args: Arguments, samples: int, prompt_length: int, response_length: int
) -> tuple[list[list[int]], list[list[float]]]:
    """(tokens of prompt and response, log-probabilities of the response) of random prompts, at temperature 1."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, args.vocab_size, (samples, prompt_length), generator=generator).tolist()
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": response_length, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    answers = call("POST", f"{serving.url}/generate", body, timeout_s=ANSWER_S, key=serving.key)
    tokens = [prompt + answer["output_ids"] for prompt, answer in zip(prompts, answers, strict=True)]
    scored = [[entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
    return tokens, scored


def greedy(serving: Serving, args: Arguments) -> list[int]:
    """The most likely continuation of a fixed prompt."""
    prompt = [(7 * number) % args.vocab_size for number in range(1, 17)]
    sampling = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling}
    return call("POST", f"{serving.url}/generate", body, timeout_s=ANSWER_S, key=serving.key)["output_ids"]


def difference_figures(
    record: Record, trainer: RandomTrainer, tokens: list[list[int]], prompt_length: int, log_probs: list[list[float]]
) -> None:
    """|train - rollout| log-probability over all tokens, as training reports it; the bound is that of --ci-test."""
    rollout = scheduled(trainer.args, rollout_of(tokens, prompt_length, log_probs))
    (metrics,) = trainer.train(0, rollout)
    bound = trainer.args.ci_train_rollout_logprob_abs_diff_threshold
    record.figure("log-probability difference, mean", metrics["train_rollout_logprob_abs_diff_mean"], at_most=bound)
    record.figure("log-probability difference, largest", metrics["train_rollout_logprob_abs_diff_max"])
    record.figure("log-probability, mean", float(rollout.rollout_log_probs.mean()))
    record.figure("tokens compared", rollout.rollout_log_probs.numel())


def memory_figures(record: Record, serving: Serving, updates: Updates, device: str, used: int) -> None:
    """Memory that the server releases, by tag, and its onload with new weights.

    The weights are updated again before the greedy answers are compared, because training has changed them meanwhile.
    """
    control = backend(SGLANG).control(serving.url, timeout_s=ANSWER_S, key=serving.key)
    first = updates.update_weights("3")
    before = greedy(serving, updates._trainer.args)
    control.flush_cache()
    released = {}
    for tag in (KV_CACHE, WEIGHTS, CUDA_GRAPHS):
        free = free_bytes(device)
        control.release_memory([tag])
        released[tag] = free_bytes(device) - free
    if device == "cuda":
        least = RELEASED * first.bytes / GIB
        record.figure("the server took", used / GIB, "GiB")
        record.figure("released: KV cache", released[KV_CACHE] / GIB, "GiB")
        record.figure("released: weights", released[WEIGHTS] / GIB, "GiB", at_least=least)
        record.figure("released: CUDA graphs", released[CUDA_GRAPHS] / GIB, "GiB")
        record.figure("the server keeps", (used - sum(released.values())) / GIB, "GiB")
    seconds, _ = timed(device, lambda: control.resume_memory([WEIGHTS]))
    again = updates.update_weights("4")
    rest, _ = timed(device, lambda: control.resume_memory([KV_CACHE, CUDA_GRAPHS]))
    record.figure("wake: memory of the weights", seconds, "s")
    record.figure("wake: update", again.seconds - again.check_seconds, "s")
    record.figure("wake: KV cache and graphs", rest, "s")
    same = greedy(serving, updates._trainer.args) == before
    record.figure("same greedy tokens afterwards", same)
    record.require(same, "with the same weights the server's greedy tokens differ after offload")
