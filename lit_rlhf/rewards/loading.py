"""Find a reward function by the name that a recipe gives it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lit_rlhf.errors import ConfigurationError


def load_function(name: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function behind a name; a function itself is given back.

    Args:
        name: ``package.module.function``, or ``path/to/file.py:function``.

    Raises:
        ConfigurationError: There is no such module, file or function, or it cannot be called.

    >>> load_function("math.sqrt")(9)
    3.0
    """
    if callable(name):
        return name
    path, colon, attribute = name.rpartition(":")
    if colon and path.endswith(".py"):
        module = _from_file(path)
    else:
        path, _, attribute = name.replace(":", ".").rpartition(".")
        if not path:
            raise ConfigurationError(f"{name!r} names no function; write package.module.function or file.py:function")
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"{name!r}: there is no module {error.name!r}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        what = "has no" if function is None else f"has a {type(function).__name__}, no function,"
        raise ConfigurationError(f"{name!r}: {path} {what} {attribute!r}")
    return function


def _from_file(path: str) -> Any:
    file = Path(path)
    if not file.is_file():
        raise ConfigurationError(f"there is no file {path!r}")
    known = f"lit_rlhf_file_{file.stem}_{abs(hash(file.resolve())):x}"
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module  # dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[known]
        raise
    return module
