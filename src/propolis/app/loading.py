"""Find the app that "module:app" names."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from operator import attrgetter
from types import ModuleType

from propolis.app.registry import Registry
from propolis.engines.address import masked_text
from propolis.errors import AppNotFound, BadCall, PropolisError


def load_app(path: str) -> Registry:
    """The app at "module:app"; "module" alone means the only app in it.  `AppNotFound` says what to mend.

    The module may lie in the working directory.  That comes last, so that a file there
    cannot take the place of the standard library or of an installed package.
    """
    if "://" in path:
        raise AppNotFound(masked_text(path), "that is the URL of an engine: give it with --url")
    name, _, attribute = path.partition(":")
    module = _import(path, name)
    if not attribute:
        return _only_app(path, module)
    try:
        found = attrgetter(attribute)(module)
    except AttributeError:
        raise AppNotFound(path, f"{_place(module)} has no {attribute!r}{_offer(module)}") from None
    if not isinstance(found, Registry):
        raise AppNotFound(path, f"it is a {type(found).__name__}, not an App{_offer(module)}")
    return found


def import_from_here_last() -> None:
    """Let modules of the working directory be imported, after everything that is installed."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


def _import(path: str, name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise AppNotFound(path, 'write it as "module:app", with dots in the name of the module')
    import_from_here_last()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise AppNotFound(path, _missing(name, error.name)) from error
        raise AppNotFound(path, _import_failure(name, error)) from error
    except BadCall as error:
        raise AppNotFound(path, _import_failure(name, error)) from error
    except PropolisError:
        raise  # a task or a setting in there is wrong, and this says which
    except Exception as error:
        raise AppNotFound(path, _import_failure(name, error)) from error


def _missing(name: str, missing: str) -> str:
    if name.endswith(".py"):
        return f'write "{name.removesuffix(".py")}", without ".py"'
    return f"there is no module {missing!r}: run from the folder that holds it, or install it"


def _import_failure(name: str, error: Exception) -> str:
    """What went wrong inside the module, and where: a traceback in one line."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"importing {name} failed: {type(error).__name__}: {error} ({where.filename}, line {where.lineno})"


def _only_app(path: str, module: ModuleType) -> Registry:
    apps = _apps(module)
    distinct = {id(app): app for app in apps.values()}
    if len(distinct) == 1:
        return next(iter(distinct.values()))
    if not apps:
        raise AppNotFound(path, f"{_place(module)} holds no App")
    raise AppNotFound(path, f"{_place(module)} holds several{_offer(module)}")


def _apps(module: ModuleType) -> dict[str, Registry]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Registry)}


def _offer(module: ModuleType) -> str:
    known = [f"{module.__name__}:{name}" for name in _apps(module)]
    return f": write {' or '.join(known)}" if known else ""


def _place(module: ModuleType) -> str:
    """The module and its file: another one of that name may have been meant."""
    file = getattr(module, "__file__", None)
    return f"module {module.__name__!r}" + (f" ({file})" if file else "")
