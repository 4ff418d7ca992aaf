"""What of the worker's environment a job in a child process may see."""

from __future__ import annotations

import os
from collections.abc import Mapping

NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "LANG", "LANGUAGE", "TZ"),
        *("TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "SYSTEMROOT"),
    )
)
BEGINNINGS = ("LC_", "PYTHON", "COVERAGE_PROCESS_")  # the last one measures our own tests


def base_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Where things are and which language is spoken: no secrets of the worker."""
    return {
        name: value for name, value in environment.items() if name in NAMES or name.startswith(BEGINNINGS)
    }


def sendable(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what is no UTF-8."""
    return {
        name: value
        for name, value in environment.items()
        if (name + value).encode("utf-8", "ignore").decode() == name + value
    }


def set_environment(environment: Mapping[str, str]) -> None:
    """Of this process, and of all that it starts from here on."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
