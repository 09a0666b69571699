"""The command line of slimrl: flags, what follows from them, and the rules that check them before anything starts."""

from slimrl.arguments.namespace import Arguments, EvalDataset
from slimrl.arguments.parse import parse_args, read_args
from slimrl.arguments.passthrough import PassthroughFlag
from slimrl.arguments.problem import Problem

__all__ = ["Arguments", "EvalDataset", "PassthroughFlag", "Problem", "parse_args", "read_args"]
