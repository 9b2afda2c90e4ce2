"""`maxdiffusion VERB ...`: the verbs, and how errors leave the program.

Exit status: 0 ok, 1 a check failed, 2 wrong usage, 3 another host is gone, 130 interrupted (a training
that Ctrl-C or SIGTERM stopped has saved its last step first).
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from maxdiffusion import __version__
from maxdiffusion.cli import hosts
from maxdiffusion.cli.ckpt import app as ckpt
from maxdiffusion.cli.doctor import doctor
from maxdiffusion.cli.evaluate import evaluate
from maxdiffusion.cli.explain import explain
from maxdiffusion.cli.generate import generate
from maxdiffusion.cli.quantize import quantize
from maxdiffusion.cli.recipes import recipes
from maxdiffusion.cli.report import report
from maxdiffusion.cli.traffic import traffic
from maxdiffusion.cli.train import train
from maxdiffusion.cli.verify import verify
from maxdiffusion.errors import HOST_GONE, INTERRUPTED, HostGoneError, MaxDiffusionWarning, UsageError

CRASHED = 1
WRONG_USAGE = 2

app = typer.Typer(
    name="maxdiffusion",
    help="Train diffusion models in JAX on any mesh of devices, and make pictures with them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _verb in (train, generate, evaluate, quantize, report, explain, verify, traffic, recipes, doctor):
    app.command()(_verb)
app.add_typer(ckpt, name="ckpt")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"maxdiffusion {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """Options before the verb."""


def run() -> NoReturn:
    """The program `maxdiffusion`: ends this process with the status of `main`.

    After Ctrl-C it ends at once: what still compiles or runs would make XLA abort while Python closes down.
    """
    status = main()
    if status == INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    Args:
        args: the words after the program's name; None takes those of this process.
    """
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("maxdiffusion").setLevel(logging.INFO)
    try:
        status = _run(args)
    except Exception:
        if not hosts.joined():
            raise
        traceback.print_exc()
        status = CRASHED
    return hosts.leave(status)


def _run(args: Sequence[str] | None) -> int:
    try:
        with warnings.catch_warnings():
            warnings.showwarning = functools.partial(_say_warning, set())
            return app(args=args, prog_name="maxdiffusion", standalone_mode=False) or 0
    except HostGoneError as error:
        _refuse(str(error))
        return HOST_GONE
    except UsageError as error:
        return _refuse(str(error))
    except typer.TyperException as error:
        return _refuse(error.format_message())
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("interrupted", err=True)
        return INTERRUPTED


def _say_warning(
    said: set[str], message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any
) -> None:
    """Our warnings are for the user, one line each, once; others keep the place that they come from."""
    place = "" if issubclass(category, MaxDiffusionWarning) else f"{filename}:{lineno}: {category.__name__}: "
    line = f"warning: {place}{message}"
    if line not in said:
        said.add(line)
        typer.echo(line, err=True)


def _refuse(message: str) -> int:
    for line in message.splitlines():
        typer.echo(f"error: {line}", err=True)
    return WRONG_USAGE
