"""Multi-turn tool use: a calculator that evaluates the expression before every `=`.

    --custom-generate-function-path examples.calculator.generate

When the model writes an equals sign, the value of the expression before it on the line is appended, and the model
continues from there. It is trained only on its own tokens, not on the calculator's.
"""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.engines.protocol import EngineClient
from slimrl.rollout.generation.multi_turn import multi_turn_generate

MAX_CALLS = 8
_EXPRESSION = re.compile(r"[0-9.+\-*/() ]+$")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


async def generate(
    args: Arguments,
    sample: Sample,
    sampling_params: dict[str, Any],
    *,
    engine: EngineClient | None = None,
    tokenizer: Any = None,
) -> Sample:
    """One sample in which the model may calculate up to `MAX_CALLS` times."""
    sample.session_id = sample.session_id or f"calculator-{sample.index}"
    return await multi_turn_generate(
        sample, sampling_params, engine=engine, tokenizer=tokenizer, tool=answer, stop=["="], max_calls=MAX_CALLS
    )


async def answer(text: str) -> str:
    """The text to append to `text`, which ends with an equals sign; a question mark if there is no expression."""
    expression = _EXPRESSION.search(text.removesuffix("="))
    try:
        return f"{float(calculate(expression.group())):g}\n" if expression else "?\n"
    except (ArithmeticError, SyntaxError, ValueError):
        return "?\n"


def calculate(expression: str) -> Fraction:
    """The exact value of an arithmetic expression. Raises SyntaxError, ZeroDivisionError, or ValueError otherwise."""
    if len(expression) > 200:
        raise ValueError("the expression is longer than 200 characters")
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError(f"{ast.unparse(node)} is not an arithmetic expression")
