"""The ``padless`` command. One file per subcommand; only the one asked for is imported."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.util import find_spec
from inspect import signature

from padless.cli._ends import INTERRUPTED, TERMINATED, guarded, tell
from padless.errors import PadlessError

__all__ = ["COMMANDS", "main"]

COMMANDS = ("bench", "verify", "tune", "analyze", "pack", "doctor")
"""Each is a function of the same name in a file of the same name, with Typer annotations."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 a check failed, 2 bad usage or input, 130 interrupted.

    Bad input ends in one line on standard error, never in a traceback. Without ``arguments`` it is the process that
    runs for the command, and its signals and output are taken care of, too.
    """
    if arguments is not None:
        _run(arguments)
        return
    with guarded(sys.argv[1:]):
        _run(sys.argv[1:])


def _run(given: list[str]) -> None:
    try:
        app = _app(given)
        try:
            app(given, prog_name="padless")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # what fails here is told, what fails as the interpreter leaves is not
    except PadlessError as error:
        print(f"padless: {_as_typed(' '.join(str(error).split()), given)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        tell(given, "interrupted")
        sys.exit(INTERRUPTED)
    except SystemExit as done:
        if done.code == INTERRUPTED:  # Typer takes the interrupt itself, and says nothing
            tell(given, "interrupted")
        elif done.code == TERMINATED:
            tell(given, "terminated")
        raise


def _as_typed(message: str, given: list[str]) -> str:
    """The message with the command's options as they are typed: ``--max-length 512`` for ``max_length=512``."""
    asked = _asked(given)
    module = sys.modules.get(f"padless.cli.{asked}")
    if asked is None or module is None:  # it could not be loaded
        return message
    options = {name for name, it in signature(getattr(module, asked)).parameters.items() if it.default is not it.empty}

    def typed(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in options:
            return found[0]
        flag = f"--{name.replace('_', '-')}"
        return flag if value in ("", "True") else f"{flag} {value.strip(chr(39))}"

    told = re.sub(r"(?<![\w-])([a-z_]+)=('[^']*'|[\w.-]*\w|)", typed, message)
    return re.sub(r"(--[\w-]+) \(\1\)", r"\1", told)


def _asked(given: list[str]) -> str | None:
    return next((word for word in given if word in COMMANDS), None)


def _app(given: list[str]):  # type: ignore[no-untyped-def]
    if find_spec("typer") is None:
        raise PadlessError('the command line needs Typer and Rich: pip install "padless[cli]"')
    import typer

    import padless

    app = typer.Typer(
        name="padless",
        help="Remove padding waste from LLM training, and prove that nothing else changed.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    @app.callback(invoke_without_command=True)
    def root(
        version: bool = typer.Option(False, "--version", help="Print the version and leave.", is_eager=True),
    ) -> None:
        if version:
            print(padless.__version__)
            raise typer.Exit

    asked = _asked(given)
    for name in (asked,) if asked else COMMANDS:
        app.command(name)(getattr(import_module(f"padless.cli.{name}"), name))
    return app
