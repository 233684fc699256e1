"""Classes and arguments from text: `TopK(density=1/64)` on a command line, without running arbitrary code."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import compress
from ..compress import Codec, Feedback

__all__ = ["codec_from", "name_and_keywords", "parse_call"]

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def parse_call(text: str, module: ModuleType) -> functools.partial[Any]:
    """`Name` or `Name(key=value, ...)`, a public class of `module`, as a partial call.

    Values are Python literals, sums and quotients of numbers, or codecs and feedback rules of `lowcomm.compress`.

    Raises:
        ValueError: the text has another form, or `module` has no such class.

    >>> import lowcomm.optim
    >>> parse_call("DiLoCo(sync_every=2 * 10, compress=Int4())", lowcomm.optim).keywords["sync_every"]
    20
    """
    name, keywords = name_and_keywords(text)
    kind = getattr(module, name) if name in module.__all__ else None
    if not isinstance(kind, type):
        raise ValueError(f"{module.__name__} has no class {name!r}; it has {', '.join(module.__all__)}")
    return functools.partial(kind, **keywords)


def name_and_keywords(text: str) -> tuple[str, dict[str, Any]]:
    """The two parts of `Name` or `Name(key=value, ...)`.

    >>> name_and_keywords("diloco(outer_lr=1/2)")
    ('diloco', {'outer_lr': 0.5})
    """
    rule = f"{text!r} is not of the form Name or Name(key=value, ...)"
    try:
        call = _call(text)
        keywords = _keywords(call)
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{rule}: {error}") from None
    if not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(rule)
    return call.func.id, keywords


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
        value = _built(_call(text), Codec)
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"codec {text!r}: {error}") from error
    assert isinstance(value, Codec)
    return value


def _call(text: str) -> ast.Call:
    node = ast.parse(text.strip(), mode="eval").body
    return node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])


def _built(call: ast.Call, *bases: type) -> object:
    """An object of a public class of `lowcomm.compress` below one of `bases`."""
    if not isinstance(call.func, ast.Name):
        raise ValueError("write a class of lowcomm.compress with literal arguments, such as TopK(density=1/64)")
    name = call.func.id
    kind = getattr(compress, name, None) if name in compress.__all__ else None
    if not (isinstance(kind, type) and issubclass(kind, bases)) or kind in bases:
        raise ValueError(f"{name} is not a {' or '.join(base.__name__.lower() for base in bases)} of lowcomm.compress")
    built: object = kind(*[_value(argument) for argument in call.args], **_keywords(call))
    return built


def _keywords(call: ast.Call) -> dict[str, Any]:
    keywords = {keyword.arg: _value(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    if len(keywords) != len(call.keywords):
        raise ValueError("** is not understood here; write the arguments out")
    return keywords


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Call):
        return _built(node, Codec, Feedback)
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
