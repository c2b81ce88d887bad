"""Packages that transformers would use if they fitted: one that does not is left out where nobody needs it."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TypeVar

Loaded = TypeVar("Loaded")

NEEDED = ("transformers", "torch", "jinja2")
"""Distributions that nothing works without, and so what these in turn require."""
OURS = ("harness", "transformers_modules")
"""The project, and the model's own code where it brings some."""
AVAILABLE = re.compile(r"is_(\w+)_available")
"""How transformers, accelerate and PEFT name what looks for a package and, finding another version, may raise."""
MOST_LEFT_OUT = 8


def without_misfits(load: Callable[[], Loaded]) -> tuple[Loaded, tuple[str, ...]]:
    """Load something; where an optional package breaks that, hide it and try again. Return it and what was left out.

    What was left out stays so for this process. Where it was needed after all, everything is back in place, and the
    last try's fault is raised with a note on each package.
    """
    left_out: dict[str, str] = {}
    while True:
        try:
            return load(), tuple(left_out)
        except Exception as error:
            culprit = next((name for name in suspects(error) if _optional(name) and name not in left_out), None)
            if culprit is None or len(left_out) == MOST_LEFT_OUT:
                for name, why in left_out.items():
                    error.add_note(f"{name} was left out, for it does not fit: {why}")
                    del sys.modules[name]
                _forget_what_was_found()
                raise
            left_out[culprit] = f"{type(error).__name__}: {error}"
        hide(culprit)


def suspects(error: BaseException) -> Iterator[str]:
    """Name the packages that an error may be due to, the first cause's first."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    for each in reversed(causes):
        frames = traceback.extract_tb(each.__traceback__)
        for frame in reversed(frames):
            if checked := AVAILABLE.fullmatch(frame.name):
                yield checked[1]
        for frame in frames:
            if (package := _package_of(Path(frame.filename))) is not None:
                yield package
        if isinstance(each, ImportError) and each.name:
            yield each.name.partition(".")[0]


def _package_of(file: Path) -> str | None:
    """Name the top-level package that a file belongs to, as far as the import path tells."""
    folders = [folder for folder in map(Path, sys.path) if folder.is_absolute() and file.is_relative_to(folder)]
    if not folders:
        return None
    # One folder of the import path may lie in another, as an environment does in the project's.
    name = file.relative_to(max(folders, key=lambda folder: len(folder.parts))).parts[0].removesuffix(".py")
    return name if name.isidentifier() else None


def _optional(name: str) -> bool:
    if name in sys.stdlib_module_names or name in OURS or not _exists(name):
        return False
    distributions = {_normal(each) for each in metadata.packages_distributions().get(name, [name])}
    return not distributions & _required()


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return True


def _required() -> set[str]:
    """List the distributions that NEEDED stand on, extras aside."""
    known: set[str] = set()
    todo = list(NEEDED)
    while todo:
        name = _normal(todo.pop())
        if name in known:
            continue
        known.add(name)
        try:
            listed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        todo += [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in listed if "extra ==" not in line]
    return known


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def hide(name: str) -> None:
    """Make a package look as if it were not installed, for this process, and let what remembers it look again."""
    for loaded in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
        del sys.modules[loaded]
    # None is what the import system takes for "not there", and so does find_spec.
    sys.modules[name] = None  # type: ignore[assignment]
    _forget_what_was_found()


def _forget_what_was_found() -> None:
    for name, module in list(sys.modules.items()):
        if name.endswith(("import_utils", "utils.imports")) and module is not None:
            for attribute in list(vars(module).values()):
                if callable(forget := getattr(attribute, "cache_clear", None)):
                    forget()
