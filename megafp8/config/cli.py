"""Command line and YAML to one validated `RunConfig`.

The command line is scanned here and not by argparse or tyro: options are taken from the pydantic
fields, exact names only, each at most once, and flags override YAML before anything is validated.
argparse takes unique prefixes and the last of repeated options; tyro parses into finished
objects, which cannot be merged raw, and answers mistakes with a box of several lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megafp8.config.checkpoint_args import SavedRun, take_model
from megafp8.config.megatron_flags import judge
from megafp8.config.messages import flag_name
from megafp8.config.names import SECTIONS, Target, suggestion, targets
from megafp8.config.paths import FilePath
from megafp8.config.precision_checks import idle_defaults
from megafp8.config.run_config import RunConfig
from megafp8.config.text import RawText, RawValue, convert, parse_bool
from megafp8.config.yaml_reader import Tree, read_yaml
from megafp8.errors import ConfigurationError

CONTROL_OPTIONS = {
    "--config": "YAML file with the sections model, parallel, precision, ...",
    "--dry-run": "print configuration, precision plan and parameter counts, train nothing",
    "--world-size": "processes that --dry-run assumes",
    "--help": "this text",
}


@dataclass(frozen=True)
class Command:
    """A parsed command line.

    Attributes:
        config: The validated run.
        dry_run: Whether only to print what would run.
        world_size: What `--world-size` said.
    """

    config: RunConfig
    dry_run: bool = False
    world_size: int | None = None


@dataclass(frozen=True)
class _Given:
    """A value for a field and the name it was given under."""

    target: Target
    value: RawValue
    where: str


def wants_help(argv: list[str]) -> bool:
    """Whether the command line asks for help."""
    return any(token in ("--help", "-h") for token in argv)


def load_config(argv: list[str]) -> RunConfig:
    """Return the run that a command line describes.

    Raises:
        ConfigurationError: One line: every unknown name or wrong value, else the first thing that
            is wrong with them together.
    """
    return parse_command(argv).config


def parse_command(argv: list[str], saved_run: SavedRun | None = None) -> Command:
    """Parse a command line: defaults < YAML < flags, merged raw and validated once.

    Args:
        argv: Arguments without the program's name.
        saved_run: Reads the checkpoint for `--use-checkpoint-args`; this package cannot.

    Raises:
        ConfigurationError: One line: every unknown name or wrong value, else the first thing that
            is wrong with them together.
    """
    options = _scan(argv)
    config_file = _control(options, "--config")
    dry_run = parse_bool(options.pop("--dry-run")[0]) if "--dry-run" in options else False
    world_size = options.pop("--world-size", None)
    accepted: list[str] = []
    given = {} if config_file is None else _from_yaml(config_file, accepted)
    flags = _from_options(options, accepted)
    for key in _set_aside(flags):
        given.pop(key, None)
    given.update(flags)
    config = _build(given, accepted, saved_run)
    named = [field for section, field in flags if section == "precision"]
    for sentence in idle_defaults(config.precision, named):
        raise ConfigurationError(sentence)
    if world_size is None:
        return Command(config, dry_run)
    if not dry_run:
        raise ConfigurationError(
            "--world-size is for --dry-run; the launcher sets the number of processes"
        )
    size = convert(world_size, int)
    if size < 1:
        raise ConfigurationError(f"--world-size: found {size}, allowed >= 1")
    return Command(config, dry_run, size)


# Of each pair a run has one; naming one on the command line sets the file's other one aside.
_ALTERNATIVES = (
    (("training", "train_iters"), ("training", "train_samples")),
    (("optimizer", "lr_warmup_iters"), ("optimizer", "lr_warmup_fraction")),
)

# What `--precision auto` decides.
_DECIDED = [("precision", name) for name in ("bf16", "fp16", "fp8_format", "fp8_recipe")]


def _set_aside(flags: dict[tuple[str, str], _Given]) -> list[tuple[str, str]]:
    """Return the keys of a file that the flags given replace by another key."""
    found = []
    for pair in _ALTERNATIVES:
        for named, other in (pair, pair[::-1]):
            if named in flags and other not in flags:
                found.append(other)
    if ("precision", "precision") in flags:
        # `auto`: a preset says what it was made for, and is not asked.
        found += [key for key in _DECIDED if key not in flags]
    return found


def _scan(argv: list[str]) -> dict[str, list[RawText]]:
    """Split a command line into options and their texts; whatever follows a name is its value."""
    options: dict[str, list[RawText]] = {}
    current: str | None = None
    for token in argv:
        if token == "--":
            raise ConfigurationError("--: found a bare --, allowed options --name value alone")
        if token.startswith("--"):
            current, equals, text = token.partition("=")
            if current in options:
                raise ConfigurationError(f"{current}: given twice; give it once")
            options[current] = [RawText(text, current)] if equals else []
        elif token[:1] == "-" and token[1:2].isalpha():
            raise ConfigurationError(
                f"{token}: unknown option; options are written --name in full"
                + suggestion("--" + token.lstrip("-"), _known_flags())
            )
        elif current is None:
            hint = f"; did you mean --config {token}?" if token.endswith((".yaml", ".yml")) else ""
            raise ConfigurationError(
                f"found {token!r} before any option, allowed --name value{hint}"
            )
        else:
            options[current].append(RawText(token, current))
    return {name: texts or [RawText("", name, switch=True)] for name, texts in options.items()}


def _control(options: dict[str, list[RawText]], name: str) -> str | None:
    texts = options.pop(name, None)
    if texts is not None and not any(raw.text.strip() for raw in texts):
        raise ConfigurationError(f"{name}: found no value, allowed the path of a YAML file")
    return None if texts is None else convert(list(texts), FilePath)


def _known_flags() -> list[str]:
    return [*CONTROL_OPTIONS, *map(flag_name, targets())]


def _each(work: Callable[..., None], items: Iterable[tuple[Any, ...]]) -> None:
    """Do a work for each item; all refusals are told as one."""
    problems = []
    for item in items:
        try:
            work(*item)
        except ConfigurationError as error:
            problems.append(str(error))
    if problems:
        raise ConfigurationError("; ".join(problems))


def _from_options(
    options: dict[str, list[RawText]], accepted: list[str]
) -> dict[tuple[str, str], _Given]:
    given: dict[tuple[str, str], _Given] = {}
    _each(partial(_add_option, given, accepted), options.items())
    return given


def _add_option(
    given: dict[tuple[str, str], _Given], accepted: list[str], name: str, texts: list[RawText]
) -> None:
    target = targets().get(name[2:].replace("-", "_")) if "_" not in name else None
    if target is not None:
        _add(given, target, texts, name)
        return
    values = [raw.text for raw in texts if not raw.switch]
    if not judge(name, values, name):
        hint = suggestion(name, _known_flags()) or "; --help lists all"
        raise ConfigurationError(f"{name}: unknown option{hint}")
    accepted.append(" ".join([name, *values]))


def _from_yaml(path: str, accepted: list[str]) -> dict[tuple[str, str], _Given]:
    given: dict[tuple[str, str], _Given] = {}

    def add_section(section: str, values: Tree) -> None:
        keys = _keys(path, section, values, accepted)
        _each(partial(_add_key, given, accepted, path, section), keys.items())

    _each(add_section, read_yaml(path).items())
    return given


def _keys(path: str, section: str, values: Tree, accepted: list[str]) -> dict[str, Tree]:
    """The keys of a section of a YAML file."""
    if section == "accepted_flags":
        accepted.extend(_texts(values, f"{path}, accepted_flags"))
        return {}
    if section not in SECTIONS:
        target = targets().get(section)
        hint = f"; it belongs in section {target.section}" if target is not None else ""
        raise ConfigurationError(
            f"{path}, {section}: unknown section{hint}, allowed {', '.join(SECTIONS)}"
        )
    if isinstance(values, RawText) and values.text == "" and not values.quoted:
        return {}  # a section whose keys are all commented out
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}, {section}: found no mapping, allowed keys of it")
    return values


def _add_key(
    given: dict[tuple[str, str], _Given],
    accepted: list[str],
    path: str,
    section: str,
    key: str,
    value: Tree,
) -> None:
    place = f"{path}, {section}.{key}"
    target = targets().get(key)
    if target is None:
        flag = flag_name(key)
        texts = _texts(value, place)
        values = [] if texts in (["true"], ["True"]) else texts
        if texts in (["false"], ["False"]) or not judge(flag, values, place):
            known = [name for name, item in targets().items() if item.section == section]
            raise ConfigurationError(f"{place}: unknown key{suggestion(key, known)}")
        accepted.append(" ".join([flag, *values]))
        return
    if target.section != section:
        raise ConfigurationError(f"{place}: belongs in section {target.section}")
    if isinstance(value, dict) or (
        isinstance(value, list) and not all(isinstance(item, RawText) for item in value)
    ):
        raise ConfigurationError(f"{place}: found nested values, allowed one value or a plain list")
    # The test above leaves a RawText or a list of them, which a checker does not see through all().
    scalars: RawValue = value  # type: ignore[assignment]
    _add(given, target, scalars, value.where if isinstance(value, RawText) else place)


def _texts(value: Tree, place: str) -> list[str]:
    items = value if isinstance(value, list) else [value]
    texts = [item.text for item in items if isinstance(item, RawText)]
    if len(texts) != len(items):
        raise ConfigurationError(f"{place}: found nested values, allowed one value or a plain list")
    return texts


def _add(given: dict[tuple[str, str], _Given], target: Target, value: RawValue, where: str) -> None:
    key = (target.section, target.field)
    if key in given:
        raise ConfigurationError(f"{where}: contradicts {given[key].where}; give one of the two")
    given[key] = _Given(target, value, where)


def _build(
    given: dict[tuple[str, str], _Given], accepted: list[str], saved_run: SavedRun | None
) -> RunConfig:
    values: dict[str, Any] = {section: {} for section in SECTIONS}

    def add_value(key: tuple[str, str], item: _Given) -> None:
        value = _typed(item)
        values[key[0]][key[1]] = not value if item.target.negated else value

    _each(add_value, given.items())
    where = {key: item.where for key, item in given.items()}
    checkpoint = values["checkpoint"]
    if checkpoint.get("use_checkpoint_args"):
        if checkpoint.get("load") is None:
            # Before anything is missed that the checkpoint would have given.
            raise ConfigurationError("--use-checkpoint-args needs --load")
        if saved_run is None:
            raise ConfigurationError("--use-checkpoint-args is for pretrain_gpt.py alone")
        path, saved = saved_run(checkpoint["load"])
        model = {field: (value, where["model", field]) for field, value in values["model"].items()}
        values["model"] = take_model(saved, model, path)
    return RunConfig.from_dict({**values, "accepted_flags": tuple(accepted)}, where)


def _typed(item: _Given) -> Any:
    try:
        return convert(item.value, item.target.annotation)
    except ConfigurationError as error:
        if not (item.target.is_bool and item.where.startswith("--")):
            raise
        # The right spelling of a switch is worth more than its type.
        flag = flag_name(item.target.field)
        off = flag if item.target.field.startswith("no_") else flag.replace("--", "--no-", 1)
        hint = f"; write {flag} for on" + ("" if off == flag else f" and {off} for off")
        raise ConfigurationError(f"{error}{hint}") from None
