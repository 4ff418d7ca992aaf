"""The command line: `skep`, also as `python -m skep`."""

from __future__ import annotations

import importlib
from typing import Any

import click

from skep import __version__
from skep.cli.output import clean, masked_text
from skep.errors import SkepError

# Where each command is.  They are imported when asked for: who enqueues does not pay for the worker.
COMMANDS = {
    "worker": "skep.cli.worker",
    "enqueue": "skep.cli.enqueue",
    "queues": "skep.cli.queues",
    "jobs": "skep.cli.jobs",
    "dead": "skep.cli.shelves",
    "broken": "skep.cli.shelves",
    "batches": "skep.cli.batches",
    "flow": "skep.cli.flow",
    "schedules": "skep.cli.schedules",
    "top": "skep.cli.top",
    "bench": "skep.cli.bench",
    "check": "skep.cli.check",
    "init": "skep.cli.storage",
}


class Failed(click.ClickException):
    """An error of ours for people: what happened and what to do next, without a traceback."""

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.message}", file=file, err=file is None)


class Misused(Failed):
    exit_code = 2


class Program(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # as click calls it
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        found = getattr(importlib.import_module(COMMANDS[cmd_name]), cmd_name)
        assert isinstance(found, click.Command)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SkepError as error:
            kind = Misused if isinstance(error, ValueError) else Failed  # settings, names and URLs
            raise kind(clean(masked_text(str(error)), lines=True)) from error


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="skep", message="%(prog)s %(version)s")
def main() -> None:
    """Background jobs that are never lost.

    Every command but `worker` and `bench` takes --app MOD:APP or --url URL.  Where neither is given, they are
    read from SKEP_APP and SKEP_URL.  With both, the app's tasks are used on the engine of the URL.

    MOD:APP is the app `APP` in module `MOD`; MOD alone means the only app in it.

    Exit codes: 0 all went well, 1 a problem was found or nothing matched, 2 the command makes no sense.

    \b
    Completion for the shell:
      bash  eval "$(_SKEP_COMPLETE=bash_source skep)"    in ~/.bashrc
      zsh   eval "$(_SKEP_COMPLETE=zsh_source skep)"     in ~/.zshrc
      fish  _SKEP_COMPLETE=fish_source skep | source     in ~/.config/fish/completions/skep.fish
    """
