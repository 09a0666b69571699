"""The command line of slimrl: flags, what follows from them, and the rules that check them before anything starts."""

from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments, EvalDataset
from slimrl.arguments.parse import parse_args, read_args
from slimrl.arguments.parser import PassthroughFlag

__all__ = ["Arguments", "EvalDataset", "PassthroughFlag", "Problem", "parse_args", "read_args"]
