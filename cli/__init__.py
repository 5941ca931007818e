"""The command line: parses, calls the library, prints."""

from __future__ import annotations

import warnings

import click

from ..checkpoint.errors import QatpackError
from ..checkpoint.hub import scrub
from .card import card
from .demo import demo
from .evaluate import evaluate
from .generate import generate
from .inspect import inspect
from .push import push
from .repack import repack
from .text import one_line, warn
from .verify import verify


class _Commands(click.Group):
    """Turns every error into one sentence on stderr, with a traceback only under --debug."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = lambda message, *_, **__: warn(str(message))
                return super().invoke(ctx)
        except QatpackError as error:
            if ctx.params["debug"]:
                scrub(error)
                raise
            raise click.ClickException(one_line(str(error))) from error
        except KeyboardInterrupt:
            raise click.ClickException(
                "interrupted; repack goes on with --resume, push and evaluate when run again, demo "
                "with a new --out."
            ) from None
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise
        except OSError as error:
            if ctx.params["debug"]:
                scrub(error)
                raise
            where = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(
                one_line(f"{where}{error.strerror or error}; mend the cause and run again.")
            ) from error
        except Exception as error:
            if ctx.params["debug"]:
                scrub(error)
                raise
            raise click.ClickException(
                one_line(
                    f"unexpected {type(error).__name__}: {error}. This is a fault of qatpack: "
                )
                + "run again with `qatpack --debug ...` and report what it prints."
            ) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="qatpack", prog_name="qatpack")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Exact W4A16 builds of Gemma's quantization-aware-trained checkpoints.

    Results go to stdout, progress and warnings to stderr. Exit status: 0 fine, 1 failed or proof
    not met, 2 wrong usage.

    \b
    Example:
      qatpack repack google/gemma-4-E2B-it-qat-q4_0-unquantized gemma-4-E2B-it-w4a16
    """


for _command in (card, demo, evaluate, generate, inspect, push, repack, verify):
    main.add_command(_command)
