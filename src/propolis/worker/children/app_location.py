"""Where an app comes from, so that a fresh process can make it again."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType

from msgspec import Struct

from propolis.app.loading import load_app
from propolis.app.registry import Registry
from propolis.errors import AppNotFound

MAIN = "__main__"


class MainScript(Struct, frozen=True):
    """The program that was started: from a file, or by the name of a module (`python -m`)."""

    name: str
    file: str | None = None


class AppLocation(Struct, frozen=True):
    """What to import, and from where, to have the same app with the same tasks."""

    app: str
    modules: tuple[str, ...]
    script: MainScript | None
    path: tuple[str, ...]


class Restoring:
    """Is an app being made again here?  Importing it must not start a worker, whose children do the same."""

    now = False


def location_of(registry: Registry, app_path: str | None = None) -> AppLocation | None:
    """None if the app is in no module's variable, or only in an interactive session."""
    app = app_path or _variable_of(registry)
    modules = {task.function.__module__ for task in registry.tasks.values()}
    if app is None:
        return None
    script = None
    if app.startswith(f"{MAIN}:") or MAIN in modules:
        script = _script()
        if script is None:
            return None
    return AppLocation(app, tuple(sorted(modules - {MAIN})), script, tuple(sys.path))


def restore(location: AppLocation) -> Registry:
    """The app, in a fresh process.  Raises `AppNotFound`, or whatever its modules raise."""
    sys.path[:] = location.path
    Restoring.now = True
    try:
        script = _import_script(location.script) if location.script else None
        app = _app_in(location.app, script)
        for module in location.modules:
            importlib.import_module(module)
    finally:
        Restoring.now = False
    return app


def _variable_of(registry: Registry) -> str | None:
    """Where the app can be reached; a module that can be imported rather than the script."""
    places = [
        f"{module}:{name}"
        for module, contents in list(sys.modules.items())
        for name, value in list(getattr(contents, "__dict__", {}).items())
        if value is registry
    ]
    return min(places, key=lambda place: place.startswith(f"{MAIN}:"), default=None)


def _script() -> MainScript | None:
    main = sys.modules[MAIN]
    if main.__spec__ is not None:
        return MainScript(main.__spec__.name)
    file = getattr(main, "__file__", None)
    return None if file is None else MainScript(Path(file).stem, str(Path(file).resolve()))


def _import_script(script: MainScript) -> ModuleType:
    """Not as `__main__`: what is guarded by `if __name__ == "__main__"` is not run."""
    if script.file is None:
        return importlib.import_module(script.name)
    spec = importlib.util.spec_from_file_location(script.name, script.file)
    if spec is None or spec.loader is None:
        raise AppNotFound(script.file, "it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.name] = module
    spec.loader.exec_module(module)
    return module


def _app_in(path: str, script: ModuleType | None) -> Registry:
    module, _, attribute = path.partition(":")
    if module != MAIN:
        return load_app(path)
    app = attrgetter(attribute)(script)
    assert isinstance(app, Registry)
    return app
