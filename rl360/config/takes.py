"""What a key takes, in words, from its type: the remedy of a wrong value. Pure."""

from __future__ import annotations

import json
import re
from typing import Any, Final, cast

import msgspec
from msgspec import inspect as kinds

from rl360.config.sections import Section

_STEP: Final = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")  # of msgspec's places: $.faults[0].step, $.engine.sglang.env[...]
_MISSING: Final = re.compile(r"missing required field `(\w+)`")
_SHOWN: Final = 60  # characters of a wrong value


def wrong(error: msgspec.ValidationError, data: dict[str, Any], kind: type[Section]) -> str:
    """Key, value, what the key takes and its default, of a value that `kind` can't hold."""
    reason, _, place = str(error).partition(" - at `$")
    place = place.removesuffix("`")
    if missing := _MISSING.search(reason):
        place += f".{missing[1]}"
    value: Any = data
    expected, usual = kinds.type_info(kind), ""
    for name, index in _STEP.findall(place):
        if name:
            field = {f.name: f for f in cast(kinds.StructType, expected).fields}[name]
            value, expected, usual = value.get(name), field.type, _default(field)
        else:
            value = value[int(index)] if index.isdigit() else None
            expected, usual = _item(expected, index), ""
    key = place.removeprefix(".")
    said = "is missing" if missing else "has a wrong entry" if value is None else f"can't be {_toml(value)}"
    return f"{key} {said}: it takes {words(expected)}{f' (the default: {usual})' if usual else ''}"


def words(kind: kinds.Type) -> str:
    """What fits a type, for somebody who writes TOML."""
    match kind:
        case kinds.BoolType():
            return "true or false"
        case kinds.IntType():
            return f"a whole number{_bounds(kind)}"
        case kinds.FloatType():
            return f"a number{_bounds(kind)}"
        case kinds.StrType(pattern=pattern):
            return f"a text like {pattern}" if pattern else 'a text in "quotes"'
        case kinds.LiteralType(values=values):
            return "one of " + ", ".join(json.dumps(v) for v in values)
        case kinds.VarTupleType(item_type=kinds.StructType()):
            return "sections of their own, [[…]]"
        case kinds.VarTupleType(item_type=item):
            return f"a list [...], each {words(item)}"
        case kinds.TupleType(item_types=items):
            return f"a list of {len(items)}, each {words(items[0])}"
        case kinds.DictType(value_type=item):
            return f"a table {{name = value}}, each value {words(item)}"
        case kinds.UnionType(types=types):
            return " or ".join(words(one) for one in types)
        case kinds.StructType():
            return f"a section with {', '.join(f.name for f in kind.fields)}"
        case _:
            return type(kind).__name__


def _bounds(kind: kinds.IntType | kinds.FloatType) -> str:
    bounds = (("at least", kind.ge), ("above", kind.gt), ("at most", kind.le), ("below", kind.lt))
    return "".join(f", {name} {bound:g}" for name, bound in bounds if bound is not None)


def _item(kind: kinds.Type, index: str) -> kinds.Type:
    """The type of one entry of a list or a table."""
    match kind:
        case kinds.TupleType(item_types=items):
            return items[int(index)]
        case kinds.VarTupleType(item_type=item) | kinds.DictType(value_type=item):
            return item
        case _:
            return kind


def _default(field: kinds.Field) -> str:
    if field.default is msgspec.NODEFAULT or isinstance(field.default, Section):
        return ""
    return _toml(msgspec.to_builtins(field.default))


def _toml(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
