"""The command line: `propolis`, also as `python -m propolis`."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from typing import Any

if sys.argv[1:2] == ["worker"]:  # before all else: until it has begun, there is nothing to be finished
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: sys.exit(0))

import click

from propolis import __version__
from propolis.cli.console.output import clean
from propolis.engines.address import masked_text
from propolis.errors import PropolisError

# Where each command is.  It is imported when it is asked for: whoever enqueues does not pay for the worker.
COMMANDS = {
    "worker": "propolis.cli.worker",
    "enqueue": "propolis.cli.enqueue",
    "queues": "propolis.cli.queues",
    "limits": "propolis.cli.queues",
    "rules": "propolis.cli.queues",
    "jobs": "propolis.cli.jobs",
    "dead": "propolis.cli.dead",
    "broken": "propolis.cli.dead",
    "batches": "propolis.cli.batches",
    "flow": "propolis.cli.flow",
    "schedules": "propolis.cli.schedules",
    "workers": "propolis.cli.live_workers",
    "top": "propolis.cli.top",
    "bench": "propolis.cli.bench",
    "check": "propolis.cli.check",
    "init": "propolis.cli.storage",
}


class Failed(click.ClickException):
    """An error of ours as people see it: what happened and what to do next, without a traceback."""

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.message}", file=file, err=file is None)


class Misused(Failed):
    exit_code = 2


UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class Program(click.Group):
    def main(self, *args: Any, **more: Any) -> Any:
        if sys.stdout is None and sys.argv[1:2] != ["worker"]:  # nothing is done of which nobody would hear
            sys.exit("error: the standard output is closed: redirect it to a file, or to /dev/null")
        try:
            return super().main(*args, **more)
        except OSError as error:  # of a full disk, for instance; click cares for a pipe that is closed
            if error.errno not in UNWRITABLE or error.filename is not None:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer would fail again
            sys.exit(f"error: the output cannot be written: {error.strerror}")

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # as click calls it
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        found = getattr(importlib.import_module(COMMANDS[cmd_name]), cmd_name)
        assert isinstance(found, click.Command)
        return found

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for number, arg in enumerate(args, 1):
            try:
                arg.encode()
            except UnicodeEncodeError:  # it may hold a password: its number is enough
                raise click.UsageError(f"argument {number} is no UTF-8", ctx) from None
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:  # it quotes what was given in the wrong place
            text = error.format_message()
            if masked_text(text) == text:
                raise
            raise click.UsageError(masked_text(text), error.ctx) from None
        except PropolisError as error:
            kind = Misused if isinstance(error, ValueError) else Failed  # settings, names and URLs
            raise kind(clean(masked_text(str(error)), lines=True)) from error


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="propolis", message="%(prog)s %(version)s")
def main() -> None:
    """Background jobs that are never lost.

    Every command but `worker` and `bench` takes --app MOD:APP or --url URL.  Where neither is given, they are
    read from PROPOLIS_APP and PROPOLIS_URL.  With both, the app's tasks are used on the engine of the URL.

    MOD:APP is the app `APP` in module `MOD`; MOD alone means the only app in it.

    The exit code is 0 if all went well, 1 if a problem was found or nothing matched, and 2 if the command
    makes no sense.

    \b
    Completion for the shell:
      bash  eval "$(_PROPOLIS_COMPLETE=bash_source propolis)"    in ~/.bashrc
      zsh   eval "$(_PROPOLIS_COMPLETE=zsh_source propolis)"     in ~/.zshrc
      fish  _PROPOLIS_COMPLETE=fish_source propolis | source     in ~/.config/fish/completions/propolis.fish
    """
