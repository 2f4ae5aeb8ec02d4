"""A strict reader of YAML files that keeps scalars as text until their field is known.

The usual reader follows YAML 1.1: 1e-4 is text, off is False, 010 is 8, 12:30:00 is 45000, and of
two equal keys the last wins without a word. Here scalars stay text (`text.py` converts them), and
equal keys, tags, merge keys and anything but mappings, lists and scalars are errors.
"""

from pathlib import Path
from typing import TypeAlias

import yaml

from megafp8.config.text import RawText
from megafp8.errors import ConfigurationError

Tree: TypeAlias = "RawText | list[Tree] | dict[str, Tree]"


class UnreadableFileError(ConfigurationError):
    """A file that this node cannot read; others may well have it, so each node says so."""


def read_yaml(path: str) -> dict[str, Tree]:
    """Read a file whose top level is a mapping.

    Returns:
        Nested mappings and lists of `RawText`; an empty file gives an empty mapping.

    Raises:
        UnreadableFileError: The file is missing or not UTF-8.
        ConfigurationError: With file and line, for what is not plain YAML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UnreadableFileError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UnreadableFileError(f"{path}: found bytes that are not UTF-8 text") from None
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            if isinstance(token, yaml.TagToken):
                tag, line = "".join(filter(None, token.value)), token.start_mark.line + 1
                raise ConfigurationError(f"{path} line {line}: tags such as {tag} are not allowed")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: not valid YAML: {_one_line(error)}") from None
    if root is None:
        return {}
    tree = _build(root, path, "")
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path}: found no mapping at the top, allowed sections")
    return tree


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    place = f"line {mark.line + 1}: " if mark is not None else ""
    return " ".join((place + problem).split())


def _build(node: yaml.Node, path: str, key: str) -> Tree:
    # The composer resolves plain scalars to tags of YAML 1.1, which are ignored.
    if isinstance(node, yaml.ScalarNode):
        return RawText(node.value, _where(node, path, key), quoted=node.style is not None)
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, path, key) for item in node.value]
    assert isinstance(node, yaml.MappingNode)
    tree: dict[str, Tree] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigurationError(f"{_where(key_node, path, key)}: keys must be plain names")
        name = key_node.value
        place = f"{key}.{name}" if key else name
        if name == "<<":
            raise ConfigurationError(f"{_where(key_node, path, place)}: merge keys are not allowed")
        if name in tree:
            raise ConfigurationError(f"{_where(key_node, path, place)}: given twice")
        tree[name] = _build(value_node, path, place)
    return tree


def _where(node: yaml.Node, path: str, key: str) -> str:
    place = f"{path} line {node.start_mark.line + 1}"
    return f"{place}, {key}" if key else place
