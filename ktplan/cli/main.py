"""`ktplan`: the table of commands and the one place where errors become exit codes.

Command modules are imported when they are used, so that `ktplan --help` starts at once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

import click

from ktplan.errors import KtplanError
from ktplan.version import __version__

# name: (module, help). The function is the name with '_' for '-'.
COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("ktplan.cli.doctor", "What this machine can run, and why."),
    "inspect": ("ktplan.cli.inspect", "What a model, store or file is and how big its parts are."),
    "convert-cpu": ("ktplan.cli.convert_cpu", "Pack routed experts for the CPU: INT8 or INT4 tiles."),
    "convert-gpu": ("ktplan.cli.convert_gpu", "Quantize experts for the GPU: GPTQ W4A16 or W8A16."),
    "profile": ("ktplan.cli.profile", "Record which experts a text uses."),
    "place": ("ktplan.cli.place", "Choose which experts live on the GPU."),
    "emit": ("ktplan.cli.emit", "Write a plan as injection rules or flags for other engines."),
    "rules": ("ktplan.cli.rules", "Check injection rules against a model."),
    "run": ("ktplan.cli.run", "Generate text or chat."),
    "eval": ("ktplan.cli.eval", "Measure what quantization and placement cost."),
    "demo": ("ktplan.cli.demo", "Walk the whole chain on the embedded model."),
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(COMMANDS[cmd_name][0]), cmd_name.replace("-", "_") + "_command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Start with 'ktplan demo', then 'ktplan inspect MODEL' on a model of your own.",
)
@click.version_option(__version__, prog_name="ktplan")
def root() -> None:
    """Run Mixture-of-Experts LLMs on one machine with a small GPU and much RAM.

    \b
    The chain:  convert-cpu, convert-gpu  ->  profile  ->  place  ->  emit  ->  run
    A MODEL is a folder with config.json, an id in the local Hugging Face cache, or 'tiny' (embedded).
    """


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0, or the code of the error (see ktplan.errors)."""
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    debug = bool(os.environ.get("KTPLAN_DEBUG"))
    try:
        # Outside its standalone mode click returns the code of an Exit instead of raising it.
        code = root.main(args=arguments, prog_name="ktplan", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KtplanError as fault:
        if debug:
            raise
        return _tell(fault.message, fault.hint, fault.exit_code)
    except click.ClickException as fault:
        fault.show()
        return fault.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _tell("interrupted", None, 130)
    except BrokenPipeError:
        # The reader of a pipe left; the rest of the output has no one to go to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, MemoryError) as fault:
        if debug:
            raise
        return _tell(str(fault) or "out of memory", "KTPLAN_DEBUG=1 shows where it happened", 1)


def _tell(message: str, hint: str | None, code: int) -> int:
    click.echo(f"error: {message}", err=True)
    if hint:
        click.echo(f"hint:  {hint}", err=True)
    return code
