"""A model small enough to be trained with GRPO on a laptop, and a task it is half good at.

Everything the quickstart and the tests train is made here: the task, the tokenizer, the Qwen3 checkpoint and its
warm start. Called by ``tools/make_tiny_model.py``; nothing else in slimrl depends on it.
"""
