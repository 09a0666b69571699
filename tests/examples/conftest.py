"""The tokenizer and the arguments of the rollout tests."""

from tests.rollout.conftest import make_args, sums, tokenizer, write_rows

__all__ = ["make_args", "sums", "tokenizer", "write_rows"]
