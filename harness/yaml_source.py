"""Strict YAML: one mapping per file, every value with its line and column, nothing read two ways.

PyYAML's safe loader takes the last of two equal keys, reads `on` as true, `010` as 8 and `10:30` as 630. Here
each of those is an error that names the place.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.errors import ConfigError, Position

Location = tuple[str | int, ...]

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)?(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
_STRING = "tag:yaml.org,2002:str"


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlSource:
    """The content of one YAML file and where each part of it stands."""

    path: Path
    data: dict[str, Any]
    positions: dict[Location, Position]
    texts: dict[Location, str]
    """Each scalar as it is written, without quotes."""

    def position(self, location: Location) -> Position:
        """Find the place of a value, or of the nearest enclosing one."""
        for end in range(len(location), -1, -1):
            if location[:end] in self.positions:
                return self.positions[location[:end]]
        return Position(path=self.path)


def read_yaml(path: Path) -> YamlSource:
    """Read one mapping from a file; a byte order mark and CRLF are tolerated.

    Raises ConfigError with file, line and column.
    """
    text = read_text(path)
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = Position(path=path, line=mark.line + 1, column=mark.column + 1) if mark else Position(path=path)
        raise ConfigError.at(at, f"not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError.at(Position(path=path), f"not YAML: {' '.join(str(error).split())}") from error
    if len(nodes) != 1 or not isinstance(nodes[0], yaml.MappingNode):
        found = "is empty" if not nodes else "holds more than one document" if len(nodes) > 1 else "is no mapping"
        raise ConfigError.at(Position(path=path, line=1), f"the file {found}; it must hold `key: value` lines")
    builder = _Builder(path)
    data = builder.build(nodes[0], ())
    return YamlSource(path=path, data=data, positions=builder.positions, texts=builder.texts)


def read_text(path: Path) -> str:
    """Read a UTF-8 file, less its byte order mark, or raise ConfigError saying what is wrong with it."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError.at(Position(path=path), "no such file") from error
    except OSError as error:
        raise ConfigError.at(Position(path=path), f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError.at(Position(path=path), f"is not UTF-8 (byte {error.start}): save it as UTF-8") from error


class _Builder:
    """Turns composed nodes into plain values, noting positions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.positions: dict[Location, Position] = {}
        self.texts: dict[Location, str] = {}
        self._open: set[int] = set()

    def build(self, node: yaml.Node, location: Location) -> Any:
        self.positions.setdefault(location, self._position(node))
        if isinstance(node, yaml.ScalarNode):
            self.texts[location] = node.value
            return self._scalar(node)
        if id(node) in self._open:
            raise ConfigError.at(self._position(node), "an alias that holds itself")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, location)
            return [self.build(item, (*location, index)) for index, item in enumerate(node.value)]
        finally:
            self._open.remove(id(node))

    def _mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[Hashable, Position] = {}
        for key_node, value_node in node.value:
            at = self._position(key_node)
            key = self.build(key_node, (*location, "\0key", key_node.start_mark.index))
            if not isinstance(key, str):
                raise ConfigError.at(at, f"the key {key!r} is not text: quote it")
            if key in first:
                raise ConfigError.at(at, f"{key} stands twice, first on line {first[key].line}: remove one")
            first[key] = at
            self.positions[(*location, key)] = at
            result[key] = self.build(value_node, (*location, key))
        return result

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if node.style is not None or node.tag not in _plain_tags():
            if node.tag != _STRING and node.style is None:
                raise ConfigError.at(self._position(node), f"`{node.value}`: YAML tag {node.tag} is not used here")
            return node.value
        return self._plain(node)

    def _plain(self, node: yaml.ScalarNode) -> Any:
        text = node.value
        if text.lower() in _WORDS and text in {text.lower(), text.title(), text.upper()}:
            return _WORDS[text.lower()]
        if _INT.fullmatch(text):
            return int(text) if len(text) < 4000 else text
        if _FLOAT.fullmatch(text) and any(c.isdigit() for c in text):
            return float(text)
        if node.tag != _STRING:
            kind = node.tag.rsplit(":", 1)[-1]
            raise ConfigError.at(
                self._position(node),
                f"`{text}` is read as {kind} by some YAML readers and as text by others: quote it, "
                "or write a plain decimal number, true or false",
            )
        return text

    def _position(self, node: yaml.Node) -> Position:
        return Position(path=self.path, line=node.start_mark.line + 1, column=node.start_mark.column + 1)


def _plain_tags() -> set[str]:
    names = ("str", "null", "bool", "int", "float", "timestamp", "merge", "value")
    return {f"tag:yaml.org,2002:{name}" for name in names}
