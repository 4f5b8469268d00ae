"""Reading a recipe: one TOML file, `--set a.b=c` on top, everything refused that isn't one.

Every error is a ConfigError with the place, the key, and what would be right there.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

import msgspec

from rl360.config.checks import check
from rl360.config.sections import Config, ConfigError, Section
from rl360.config.takes import wrong

S = TypeVar("S", bound=Section)


def load(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Read a recipe, apply `a.b=value` overrides, check everything."""
    sections = ", ".join(get_type_hints(Config))
    data = read_toml(path, str(path), f"a recipe is TOML with sections of {sections}: see recipes/")
    for item in overrides:
        override(data, item)
    return parse(data, where=" ".join((str(path), *(f"--set {item}" for item in overrides))))


def read_toml(path: Path, where: str, remedy: str) -> dict[str, Any]:
    """A TOML document that says something. Raises ConfigError: the place (`where`), what is wrong, the remedy."""
    try:
        data = tomllib.loads(path.read_bytes().decode())
    except OSError as e:
        raise ConfigError(f"{where}: can't be read ({e.strerror}); {remedy}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"{where}: not valid TOML: {e}; {remedy}") from None
    if not data:
        raise ConfigError(f"{where}: is empty; {remedy}")
    return data


def parse(data: dict[str, Any], where: str = "recipe") -> Config:
    """Typed config of a parsed TOML document."""
    config = convert(data, Config, where)
    check(config, where)
    return config


def convert(data: dict[str, Any], kind: type[S], where: str) -> S:
    """A section of a parsed document. Raises ConfigError naming an unknown key and the nearest valid one, or a wrong value."""
    _refuse_unknown(data, kind, where, ())
    _refuse_unrecordable(data, where, "")
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{where}: {wrong(e, data, kind)}") from None


def to_toml_data(config: Config) -> dict[str, Any]:
    """Plain data of a config (every key, defaults included)."""
    return cast(dict[str, Any], msgspec.to_builtins(config))


def override(data: dict[str, Any], item: str) -> None:
    """Put `section.key=value` into a parsed document. Raises ConfigError."""
    key, eq, value = item.partition("=")
    if not eq or not key:
        raise ConfigError(f"--set {item!r}: write it as section.key=value")
    try:
        parsed = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value
    *path, last = key.split(".")
    for part in path:
        below = data.setdefault(part, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--set {item!r}: {part!r} is a value, not a section")
        data = cast(dict[str, Any], below)
    data[last] = parsed


def _refuse_unknown(data: dict[str, Any], struct: type[Section], where: str, path: tuple[str, ...]) -> None:
    hints = get_type_hints(struct)
    for key, value in data.items():
        if key not in hints:
            name = ".".join((*path, key))
            near = difflib.get_close_matches(key, hints, n=1, cutoff=0.5) or _elsewhere(key)
            hint = f"; did you mean {_full(near[0], hints, path)}?" if near else ""
            raise ConfigError(f"{where}: unknown key {name!r}{hint} (valid here: {', '.join(hints)})")
        below = hints[key]
        if isinstance(below, type) and issubclass(below, Section) and isinstance(value, dict):
            _refuse_unknown(cast(dict[str, Any], value), below, where, (*path, key))
        elif (item := _section_of(below)) and isinstance(value, list):
            for number, entry in enumerate(cast(list[Any], value)):
                if isinstance(entry, dict):
                    _refuse_unknown(cast(dict[str, Any], entry), item, where, (*path, f"{key}[{number}]"))


def _refuse_unrecordable(value: Any, where: str, key: str) -> None:
    """Every value of a config is recorded, in recipe.json and in RunStarted: what those can't hold is refused before they are written."""
    if isinstance(value, dict):
        for name, below in cast(dict[str, Any], value).items():
            _refuse_unrecordable(below, where, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for number, below in enumerate(cast(list[Any], value)):
            _refuse_unrecordable(below, where, f"{key}[{number}]")
    elif why := _unrecordable(value):
        raise ConfigError(f"{where}: {key}: {why}")


def _unrecordable(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not finite: give a number"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "the integer does not fit into 64 bits: give a smaller one"
    if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
        return "a NUL or half a UTF-16 pair can't be part of a text: take it out"
    return ""


def _section_of(hint: Any) -> type[Section] | None:
    """The section that a list of sections ([[key]] in TOML) is made of."""
    arguments = get_args(hint)
    return arguments[0] if arguments and isinstance(arguments[0], type) and issubclass(arguments[0], Section) else None


def _full(key: str, here: Collection[str], path: tuple[str, ...]) -> str:
    return ".".join((*path, key)) if key in here else key


def _elsewhere(key: str) -> list[str]:
    """A key that exists in another section under the same name."""
    sections = {s: t for s, t in get_type_hints(Config).items() if isinstance(t, type)}
    return [f"{s}.{key}" for s, t in sections.items() if key in get_type_hints(t)][:1]
