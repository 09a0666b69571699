"""Multi-turn tool use: a calculator. The model is trained only on its own tokens, not on the calculator's.

    --custom-generate-function-path examples.calculator.generate

When the model writes an equals sign, the value of the expression before it on the line is appended, and the model
continues from there.

    --custom-generate-function-path examples.calculator.generate_with_tool_calls --apply-chat-template --tool-key tools

A chat model of the Qwen family calls the tool `calculate` of its prompt's schemas, `SCHEMA` in the column `tools`, and
reads the result in a user's turn, as its chat template renders it.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Awaitable, Callable
from fractions import Fraction
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.engines.protocol import EngineClient
from slimrl.rollout.generation.multi_turn import multi_turn_generate

MAX_CALLS = 8
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
_CALL = re.compile(r"<tool_call>(.*)</tool_call>$", re.DOTALL)
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
    return await _converse(sample, sampling_params, engine, tokenizer, tool=answer, stop="=")


async def answer(text: str) -> str:
    """The text to append to `text`, which ends with an equals sign; a question mark if there is no expression."""
    expression = _EXPRESSION.search(text.removesuffix("="))
    try:
        return f"{shown(calculate(expression.group()))}\n" if expression else "?\n"
    except (ArithmeticError, SyntaxError, ValueError):
        return "?\n"


async def generate_with_tool_calls(
    args: Arguments,
    sample: Sample,
    sampling_params: dict[str, Any],
    *,
    engine: EngineClient | None = None,
    tokenizer: Any = None,
) -> Sample:
    """One sample in which the model may call its tool up to `MAX_CALLS` times, once per turn."""
    return await _converse(sample, sampling_params, engine, tokenizer, tool=respond, stop="</tool_call>")


async def _converse(
    sample: Sample,
    sampling_params: dict[str, Any],
    engine: EngineClient | None,
    tokenizer: Any,
    *,
    tool: Callable[[str], Awaitable[str]],
    stop: str,
) -> Sample:
    sample.session_id = sample.session_id or f"calculator-{sample.index}"
    return await multi_turn_generate(
        sample, sampling_params, engine=engine, tokenizer=tokenizer, tool=tool, stop=[stop], max_calls=MAX_CALLS
    )


async def respond(text: str) -> str:
    """What follows a turn `text` that ends with a call: its end, the tool's turn, the start of the next one."""
    turn = f"<|im_start|>user\n<tool_response>\n{result(text)}\n</tool_response><|im_end|>"
    return f"<|im_end|>\n{turn}\n<|im_start|>assistant\n"


def result(text: str) -> str:
    """The result of the last call in `text`, or what is wrong with it, which the model may correct.

    It has no text of the model, which could be markup of the chat template or long.
    """
    found = _CALL.search(text[text.rfind("<tool_call>") :])
    try:
        call = json.loads(found.group(1) if found else "")
        if call["name"] != "calculate":
            return "error: there is no such tool"
        return shown(calculate(call["arguments"]["expression"]))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        return f"error: {type(error).__name__}"


def shown(value: Fraction) -> str:
    """An integer as it is, another number with 15 digits."""
    return str(value) if value.denominator == 1 else f"{float(value):.15g}"


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
