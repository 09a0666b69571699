"""GRPO with TRL, for benchmarks/against_trl.py: runs in TRL's own environment and prints one JSON line.

    OMP_NUM_THREADS=2 /path/to/trl/bin/python benchmarks/trl_grpo.py --model FOLDER --prompts FILE --lengths FILE
        --batch 256 --steps 6

Trains the model of `FOLDER` with trl.GRPOTrainer and generation by transformers. `--lengths` has one number per line:
sample i of the run, in the order in which TRL generates them, gets exactly that many tokens, the last of them the end
token. Prints {"seconds": [seconds of each optimizer step], "tokens": [generated tokens of each step]}.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback

GROUP = 8


class ExactLengths(LogitsProcessor):
    """Rows of one call of `generate` end after `lengths` new tokens each, never before."""

    def __init__(self, lengths: torch.Tensor, prompt_tokens: int, end_token: int) -> None:
        self._last, self._prompt, self._end = lengths - 1, prompt_tokens, end_token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] scores with the end token excluded, or as the only token."""
        ends = self._last <= input_ids.shape[1] - self._prompt
        scores = scores.masked_fill(ends[:, None], -torch.inf)
        scores[:, self._end] = torch.where(ends, 0.0, -torch.inf)
        return scores


class StepTimes(TrainerCallback):
    """Wall-clock seconds between the ends of optimizer steps."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends = [time.perf_counter()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def fix_lengths(model: Any, lengths: list[int], end_token: int) -> None:
    """Makes `model.generate` give the samples of the run these lengths, in order."""
    generate, remaining = model.generate, iter(lengths)

    def with_lengths(*args: Any, **kwargs: Any) -> Any:
        rows, prompt_tokens = kwargs["input_ids"].shape
        chosen = torch.tensor([next(remaining) for _ in range(rows)])
        processor = ExactLengths(chosen, prompt_tokens, end_token)
        return generate(*args, **kwargs, logits_processor=LogitsProcessorList([processor]))

    model.generate = with_lengths


def main() -> None:
    """Trains, then prints the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="jsonl with chat messages under prompt")
    parser.add_argument("--lengths", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples per optimizer step")
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    from datasets import Dataset  # here, so that --help needs neither
    from trl import GRPOConfig, GRPOTrainer

    lengths = [int(line) for line in args.lengths.read_text(encoding="utf-8").split()]
    rows = [{"prompt": json.loads(line)["prompt"]} for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    fix_lengths(model, lengths, tokenizer.eos_token_id)
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=args.batch,
            num_generations=GROUP,
            max_completion_length=max(lengths),
            max_steps=args.steps,
            num_iterations=1,
            beta=0.0,
            loss_type="grpo",
            epsilon=0.2,
            epsilon_high=0.28,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            temperature=1.0,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [float(len(str(one)) % 2) for one in completions],
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[times],
        )
        trainer.train()
    seconds = [end - begin for begin, end in zip(times.ends, times.ends[1:], strict=False)]
    tokens = [sum(lengths[step * args.batch : (step + 1) * args.batch]) for step in range(len(seconds))]
    print(json.dumps({"seconds": seconds, "tokens": tokens}))


if __name__ == "__main__":
    main()
