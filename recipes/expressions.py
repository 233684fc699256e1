"""Codecs from text: `TopK(density=1/64)` on a command line, without running arbitrary code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from .. import compress
from ..compress import Codec

__all__ = ["codec_from"]

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def codec_from(text: str) -> Codec:
    """The codec that `text` builds: a class of `lowcomm.compress` with literal arguments, or its bare name.

    Arguments are numbers (with + - * /), strings, booleans, None, tuples or codecs.

    Raises:
        ValueError: the text is anything else, or the class refuses the arguments.

    >>> codec_from("TopK(density=1/64)").nbytes(2**20)
    21504
    >>> codec_from("open('x')")
    Traceback (most recent call last):
    ...
    ValueError: codec "open('x')": open is not a codec of lowcomm.compress
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        value = _codec(ast.Call(func=node, args=[], keywords=[]) if isinstance(node, ast.Name) else node)
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"codec {text!r}: {error}") from error
    return value


def _codec(node: ast.expr) -> Codec:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("write a class of lowcomm.compress with literal arguments, such as TopK(density=1/64)")
    name = node.func.id
    kind = getattr(compress, name, None) if name in compress.__all__ else None
    if not (isinstance(kind, type) and issubclass(kind, Codec)) or kind is Codec:
        raise ValueError(f"{name} is not a codec of lowcomm.compress")
    keywords = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    if len(keywords) != len(node.keywords):
        raise ValueError("** is not understood here; write the arguments out")
    return kind(*[_value(argument) for argument in node.args], **keywords)


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Call):
        return _codec(node)
    if isinstance(node, ast.BinOp):
        if type(node.op) not in _BINARY:
            raise ValueError("only + - * / are understood between numbers")
        return _BINARY[type(node.op)](_number(node.left), _number(node.right))
    return ast.literal_eval(node)


def _number(node: ast.expr) -> float:
    value = _value(node)
    if not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is not a number")
    return value
