# SPDX-License-Identifier: Apache-2.0
"""Writes TOML, canonically: the standard library only reads it.

Tables keep the order they are given in; strings, integers, lists of strings and tables of them are all there is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_BARE = re.compile(r"^[A-Za-z0-9_-]+$")


def render(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """`table` as TOML: its plain values first, then its tables, then its lists of tables."""
    plain = {key: value for key, value in table.items() if not _holds_tables(value)}
    text = "".join(f"{_key(key)} = {_value(value)}\n" for key, value in plain.items())
    for key, value in table.items():
        inner = (*path, key)
        name = ".".join(_key(part) for part in inner)
        if isinstance(value, Mapping):
            body = render(value, inner)
            head = f"\n[{name}]\n" if not value or any(not _holds_tables(item) for item in value.values()) else ""
            text += head + body
        elif _holds_tables(value):
            text += "".join(f"\n[[{name}]]\n{render(item, inner)}" for item in value)
    return text


def _holds_tables(value: object) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(item, Mapping) for item in value))


def _key(key: str) -> str:
    return key if _BARE.match(key) else _string(key)


def _value(value: object) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Sequence):
        inner = "".join(f"    {_value(item)},\n" for item in value)
        return f"[\n{inner}]" if value else "[]"
    raise TypeError(f"{value!r}: TOML writer knows strings, integers, lists and tables")


def _string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    if any(ord(letter) < 32 for letter in escaped):
        raise TypeError(f"{text!r}: TOML writer knows no control characters")
    return f'"{escaped}"'
