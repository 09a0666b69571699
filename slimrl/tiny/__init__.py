"""A model small enough for GRPO training on a laptop, and a task that it solves in part.

The task, tokenizer, Qwen3 checkpoint and SFT warm start of the quickstart and the tests. Called by
``tools/make_tiny_model.py``; nothing else in slimrl depends on it.
"""
