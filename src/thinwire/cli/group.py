"""The command group: commands are imported when they are run, and errors become exit statuses."""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import click

from thinwire.cli.console import plain
from thinwire.cli.exits import exit_code, hint
from thinwire.errors import Misuse, ThinwireError

__all__ = ["LazyCommand", "LazyGroup", "print_error"]


@dataclass(frozen=True)
class LazyCommand:
    """A command that is not imported yet.

    Attributes:
        target: ``module:attribute`` of the click command.
        summary: its line in the list of commands.
        extra: the optional extra that it needs, if any.
    """

    target: str
    summary: str
    extra: str = ""


class LazyGroup(click.Group):
    """A group of :class:`LazyCommand`; listing them imports none.

    Every error ends as ``error: …`` and ``hint: …`` on stderr and a status from
    :mod:`thinwire.cli.exits`.
    """

    def __init__(self, *args: Any, lazy: dict[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands' names, in the order of the help page."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import a command.

        Raises:
            Misuse: it needs an extra that is not installed.
        """
        lazy = self.lazy.get(name)
        if lazy is None:
            return None
        module, _, attribute = lazy.target.partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            if not lazy.extra:
                raise
            raise Misuse(
                f"`thinwire {name}` cannot be loaded: {error}",
                hint=f'pip install "thinwire[{lazy.extra}]"',
            ) from error
        if not isinstance(command, click.Command):
            raise TypeError(f"{lazy.target} is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands on the help page."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.summary) for name, lazy in self.lazy.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        try:
            _prepare_streams()
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except BrokenPipeError as error:
            # whatever is still buffered has nowhere to go, at exit neither
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(exit_code(error))
        except KeyboardInterrupt as error:
            click.echo("interrupted", err=True)
            ctx.exit(exit_code(error))
        except Exception as error:  # noqa: BLE001 -- here they all end
            if ctx.params.get("traceback"):
                click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
            command = f"{ctx.command_path} {ctx.invoked_subcommand or ''}".rstrip()
            print_error(_message(error), hint(error, command))
            ctx.exit(exit_code(error))
        return result


def print_error(message: str, hint: str) -> None:
    """``error: …`` and ``hint: …`` on stderr."""
    color = False if os.environ.get("NO_COLOR") else None
    click.secho("error: ", fg="red", bold=True, err=True, nl=False, color=color)
    click.echo("\n".join(map(plain, message.splitlines())), err=True)
    click.secho("hint: ", fg="yellow", err=True, nl=False, color=color)
    click.echo("\n".join(map(plain, hint.splitlines())), err=True)


def _prepare_streams() -> None:
    """Closed ones swallow; what an encoding lacks is shown escaped. Neither is an error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            lossless = stream.encoding.lower() == "utf-8" and stream.errors != "strict"
            stream.reconfigure(errors=stream.errors if lossless else "backslashreplace")


def _message(error: Exception) -> str:
    if isinstance(error, (ThinwireError, OSError)):
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"
