"""One sentence where the parser of command lines and recipes writes a page: what was given, where, what is allowed.

The parser tries every type that an option may have and reports each attempt; the sentence is made from the attempt that
came furthest.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

from lit_rlhf.errors import UsageError

_COMMANDS = ("fit", "validate", "test", "predict")
_TOP_LEVEL = ("model", "data", "trainer", "seed_everything", "ckpt_path", "weights_only", "traceback", "verbose",
              "return_predictions", *_COMMANDS)  # fmt: skip
_BASES = {"model": L.LightningModule, "data": L.LightningDataModule, "callbacks": L.Callback, "logger": Logger}
_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "tuple": "a list"}


class OneLineParser(LightningArgumentParser):
    """A parser whose errors are one sentence."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **options)  # a shortened name is a misspelt one

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise it, except where the parser itself goes on with another attempt."""
        if not self.exit_on_error:
            super().error(message, ex)
        raise UsageError(explain(message)) from ex


def check_recipes(arguments: Sequence[str], top_level: Sequence[str] = _TOP_LEVEL) -> None:
    """Read the files after ``-c``: the parser's own errors do not name them.

    Args:
        arguments: The command line.
        top_level: Keys that the files may have.

    Raises:
        UsageError: Naming the file, and the line where it can be known.
    """
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name not in ("-c", "--config"):
            continue
        following = arguments[place + 1 : place + 2]
        path = value if equals else next(iter(following), None)
        if path is None:
            raise UsageError(f"{name} needs a recipe: {name} path/to/recipe.yaml")
        try:
            content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
        except OSError as error:
            raise UsageError(f"{name} {path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: no text in UTF-8 (byte {error.start})") from error
        except yaml.MarkedYAMLError as error:
            line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
            raise UsageError(f"{path}{line}: {error.problem}") from error
        if not isinstance(content, dict):
            what = "is empty" if content is None else f"is a {type(content).__name__}"
            wanted = ", ".join(f"{key}:" for key in top_level[:3])
            raise UsageError(f"{path}: this file should have {wanted} at its top level, but it {what}")
        for key in content:
            if key not in top_level:
                raise UsageError(f"{path}: there is no option {key!r}{nearest(str(key), top_level)}")


def check_nulls(key: str, part: Any) -> None:
    """Refuse ``null`` where a class does not expect it; the parser takes it for any type.

    Args:
        key: ``model`` or ``data``.
        part: Of the parsed recipe, with ``class_path`` and ``init_args``.

    Raises:
        UsageError: Naming the option.
    """
    kind = _import(part.class_path)
    for name, value in vars(part.get("init_args") or Namespace()).items():
        if value is None and not _takes_none(kind, name):
            raise UsageError(f"{key}.{name} must have a value, got null")


def _takes_none(kind: type, name: str) -> bool:
    for ancestor in kind.__mro__:
        init = vars(ancestor).get("__init__")
        parameter = None if init is None else inspect.signature(init).parameters.get(name)
        if parameter is not None:
            described = str(parameter.annotation)
            return parameter.default is None or any(word in described for word in ("None", "Optional", "Any", "_empty"))
    return True


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which the first would be forgotten without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Of one mapping in the file."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def explain(message: str) -> str:
    """The sentence for an error of the parser's.

    Args:
        message: The parser's report.

    >>> explain('''Parser key "model":
    ...   Errors:
    ...     - Problem with given class_path 'lit_rlhf.GRPOModule':
    ...         Parser key "kl_placement":
    ...           Expected a typing.Literal['reward', 'loss']. Got value: los''')
    "model.kl_placement must be one of 'reward', 'loss', got 'los'; did you mean 'loss'?"
    """
    text = re.sub(r"(?m)^ *Subtypes: .*\n?", "", message)
    report, _, given = text.partition("Given value type:")
    for pattern, sentence in _SENTENCES:
        if found := re.search(pattern, text if pattern.startswith("(?m)") else report):
            return str(sentence(found, _option(report, found.start()), given))
    return " ".join(message.split())[:600]


def nearest(name: str, names: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or nothing.

    Args:
        name: That does not exist.
        names: Those that do.
    """
    close = difflib.get_close_matches(name, list(names), 1, 0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _option(report: str, end: int) -> str:
    """Full name of the option that a place in the report is about: the keys around it, by indentation."""
    keys: list[tuple[int, str]] = []
    for found in re.finditer(r'(?m)^( *).*?Parser key "([^"]+)"', report[: report.find("\n", end) if end else None]):
        indentation = len(found[1])
        keys = [(depth, key) for depth, key in keys if depth < indentation]
        if not any(key == found[2] for _, key in keys):
            keys.append((indentation, found[2]))
    return ".".join(key for _, key in keys) or "the recipe"


def _class_around(found: re.Match[str]) -> str | None:
    before = re.findall(r"class_path '([^']+)'", found.string[: found.start()])
    behind = re.search(r"class_path='([^']+)'", found.string[found.start() :].partition("\n")[0])
    return behind[1] if behind else before[-1] if before else None


def _unknown_option(found: re.Match[str], option: str, given: str) -> str:
    path = _class_around(found)
    if path is None:
        return f"{option}: there is no option {found[1]!r}"
    parser = ArgumentParser()
    parser.add_class_arguments(_import(path), fail_untyped=False)
    names = [name.split(".")[0] for name in parser.get_defaults().keys()]  # noqa: SIM118
    known = ", ".join(dict.fromkeys(names)) or "none, name another class in class_path:"
    hint = nearest(found[1], names) or f"; its options are {known}"
    return f"{option}: {path.rpartition('.')[2]} has no option {found[1]!r}{hint}"


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _missing(found: re.Match[str], option: str, given: str) -> str:
    names = found[1].split(", ")
    path = _class_around(found)
    if path is not None:
        return f"{option}: {path.rpartition('.')[2]} needs {' and '.join(names)}"
    command = names[0].partition(".")[0]
    wanted = " and ".join(f"{name.partition('.')[2]}:" for name in names)
    return f"lit-rlhf {command} needs {wanted}; a recipe has them: lit-rlhf {command} -c recipe.yaml"


def _unknown_class(found: re.Match[str], option: str, given: str) -> str:
    name = found[1]
    base = _BASES.get(option.rpartition(".")[2])
    names = [] if base is None else [kind.__name__ for kind in _subclasses(base)]
    return f"{option}: there is no class {name!r}{nearest(name, names) or ' (classes of your own need their module)'}"


def _subclasses(base: type) -> set[type]:
    children: list[type] = base.__subclasses__()
    return set(children).union(*(_subclasses(child) for child in children))


def _literals(found: re.Match[str], option: str, given: str) -> str:
    listed = re.findall(r"typing\.Literal(\[[^\]]*\])", found.string)
    allowed = [value for values in listed for value in ast.literal_eval(values)]
    value = _given(found, given)
    choices = ", ".join(repr(choice) for choice in dict.fromkeys(allowed))
    return f"{option} must be one of {choices}, got {value!r}{nearest(value, [str(choice) for choice in allowed])}"


def _given(found: re.Match[str], given: str) -> str:
    """The value, from beside the complaint or from the end of the report."""
    here = re.search(r"Got value: (.*)", found.string[found.start() :])
    there = re.search(r"Given value: (.*)", given)
    return here[1] if here else there[1] if there else "?"


def _wrong_type(found: re.Match[str], option: str, given: str) -> str:
    kinds = [kind for kind in re.findall(r"Expected an? <class '([^']+)'>", found.string) if kind != "NoneType"]
    wanted = " or ".join(dict.fromkeys(_WORDS.get(kind, kind.rpartition(".")[2]) for kind in kinds))
    return f"{option} must be {wanted}, got {_given(found, given)!r}"


def _unknown_key(found: re.Match[str], option: str, given: str) -> str:
    return _no_option(found[1])


def _no_option(full_name: str) -> str:
    *parents, name = full_name.split(".")
    where = f"{'.'.join(parents)} has" if parents else "there is"
    names: Iterable[str] = inspect.signature(L.Trainer).parameters if parents == ["trainer"] else _TOP_LEVEL
    return f"{where} no option {name!r}{nearest(name, names)}"


def _unrecognised(found: re.Match[str], option: str, given: str) -> str:
    word = found[1].partition("=")[0]
    if not word.startswith("--"):
        return f"{found[1]!r} belongs to no option; options are written --model.lr 1e-6"
    head, dot, rest = word.removeprefix("--").partition(".")
    if head == "trainer":
        return f"{word}: {_no_option(f'{head}.{rest}')}"
    close = difflib.get_close_matches(head, _TOP_LEVEL, 1, 0.6)
    return f"there is no option {word}" + (f"; did you mean --{close[0]}{dot}{rest}?" if close else "")


def _plain(words: str) -> Any:
    return lambda found, option, given: words.format(*found.groups(), option=option)


# Patterns in the order of what they tell; those with (?m) look at the whole report.
_SENTENCES: tuple[tuple[str, Any], ...] = (
    (r"Option '([^']+)' is not accepted", _unknown_option),
    (r"accept option '([^']+)'", _unknown_key),
    (r"arguments are required: ([\w., ]+)", _missing),
    (r"module '([\w.]+)' has no attribute '(\w+)'", lambda found, option, given: _no_attribute(found, option)),
    (r"No module named '([^']+)'", _plain("{option}: there is no module {0!r}")),
    (r"Import path (\S+) does not correspond to a subclass of (\S+)", _plain("{option}: {0} is no {1}")),
    (r"Import path does not correspond to a subclass of (\S+)", _plain("{option}: this class is no {0}")),
    (r"Requirement '([^']+)' not met", _plain("{option}: the package {0} is not installed")),
    (r"Parser key \"\w+\":\s+Expected an? <class '", _wrong_type),
    (r"Expected an? typing\.Literal", _literals),
    (r"Expected a (tuple with \d+ elements). Got value: (.*)", _plain("{option} must be a {0}, got {1}")),
    (r"Expected a dot import path string: (\S+)", _unknown_class),
    (r"class_path '(?:[\w.]+\.)?(\w+)':\s+((?!Parser key).+)", _plain("{option}: {0}: {1}")),
    (r"Errors:\n +- (?!Expected|Not a valid)(.+)", _plain("{option}: {0}")),
    (r"dict with class_path entry", _plain("{option}: write class_path: and, inside init_args:, its options")),
    (r"invalid choice: '([^']*)'", lambda found, option, given: _no_command(found[1])),
    (r"expected \"subcommand\"", lambda found, option, given: _no_command(None)),
    (r"unrecognized arguments: (\S+)", _unrecognised),
    (r"argument (\S+): expected one argument", _plain("{0} needs a value")),
    (r"expects a function or a callable class: (.*?)\. Got value: (.*)", _plain("{option}: {0}")),
    (r"(?m)Expected an? <class '", _wrong_type),
)


def _no_attribute(found: re.Match[str], option: str) -> str:
    names = [name for name in dir(sys.modules.get(found[1])) if not name.startswith("_")]
    return f"{option}: there is no {found[1]}.{found[2]}{nearest(found[2], names)}"


def _no_command(name: str | None) -> str:
    from lit_rlhf.commands import COMMANDS

    names = [*_COMMANDS, *COMMANDS]
    said = "give a command" if name is None else f"there is no command {name!r}"
    return f"{said}; the commands are {', '.join(names)}"
