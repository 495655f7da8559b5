"""`ktplan`: the table of commands and the one place where errors become exit codes.

Command modules are imported when they are used, so that `ktplan --help` starts at once.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType

import click

from ktplan.artifact import os_trouble
from ktplan.cli.options import ManyFiles
from ktplan.errors import KtplanError
from ktplan.version import __version__

# name: (module, help). The function is the name with '_' for '-'.
COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("ktplan.cli.doctor", "What this machine can run, and why."),
    "inspect": ("ktplan.cli.inspect", "What a model, store or file is and how big its parts are."),
    "convert-cpu": ("ktplan.cli.convert_cpu", "Pack routed experts for the CPU: INT8 or INT4 tiles."),
    "verify": ("ktplan.cli.verify", "Read a store again: is it whole, how far is it from its model?"),
    "repartition": ("ktplan.cli.repartition", "Split a store for another number of NUMA nodes."),
    "convert-gpu": ("ktplan.cli.convert_gpu", "Quantize experts for the GPU: GPTQ W4A16 or W8A16."),
    "profile": ("ktplan.cli.profile", "Record which experts a text uses."),
    "place": ("ktplan.cli.place", "Choose which experts live on the GPU."),
    "emit": ("ktplan.cli.emit", "Write a plan as injection rules or flags for other engines."),
    "rules": ("ktplan.cli.rules", "Check injection rules against a model."),
    "run": ("ktplan.cli.run", "Generate text or chat."),
    "eval": ("ktplan.cli.eval", "Measure what quantization and placement cost."),
    "demo-model": ("ktplan.cli.demo_model", "Build a real MoE model from a package's weights."),
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
    """Run a command and leave the process with 0, or with the code of the error (see ktplan.errors)."""
    try:
        _open_streams()
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup's choice stays
                signal.signal(number, signal.default_int_handler)
        if not os.environ.get("KTPLAN_DEBUG"):
            sys.excepthook = _tell_own_fault
        code = _run(arguments)
    except KeyboardInterrupt:  # outside of a command's own work
        code = _tell("interrupted", None, 130)
    # All is written and cleaned up. Python would spend half a second on taking torch apart, and a signal that comes
    # then, or came through an import that C code had begun, would end a finished command as a killed one.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _run(arguments: list[str] | None) -> int:
    debug = bool(os.environ.get("KTPLAN_DEBUG"))
    try:
        # Outside its standalone mode click returns the code of an Exit instead of raising it.
        code = root.main(args=arguments, prog_name="ktplan", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except KtplanError as fault:
        if debug:
            raise
        return _tell(fault.message, fault.hint, fault.exit_code)
    except click.ClickException as fault:
        return _tell_usage(fault)
    except (click.Abort, KeyboardInterrupt):
        return _tell("interrupted", None, 130)
    except BrokenPipeError:
        _forget_stdout()
        return 1
    except OSError as fault:
        if debug:
            raise
        if fault.filename is None:
            _forget_stdout()  # where it was the answer that could not be written, it never will be
        trouble = os_trouble(fault)
        return _tell(trouble.message, trouble.hint, trouble.exit_code)
    except MemoryError:
        if debug:
            raise
        return _tell(
            "the memory is not enough", "close other programs, or use a smaller part of the model", 3
        )


def _open_streams() -> None:
    """Give closed standard streams somewhere to go, lest the next file that is opened takes their place.

    Text that a stream cannot show, like a file's name in an unknown encoding, is written as escapes.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _forget_stdout() -> None:
    """The reader of a pipe left, or the disk is full: the rest of the output has no one to go to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell_usage(fault: click.ClickException) -> int:
    """click's complaints in our form: one line, and where the right words are listed."""
    context = getattr(fault, "ctx", None)
    if isinstance(fault, click.exceptions.NoArgsIsHelpError):
        fault.show()
        return fault.exit_code
    hint = f"{context.command_path if context else 'ktplan'} --help"
    if isinstance(fault, click.MissingParameter) and context is not None:
        greedy = [option.opts[0] for option in context.command.params if isinstance(option, ManyFiles)]
        if greedy and isinstance(fault.param, click.Argument):
            hint = f"{greedy[0]} takes every word up to the next option: put {fault.param.human_readable_name} first"
    return _tell(" ".join(fault.format_message().split()), hint, fault.exit_code)


def _tell_own_fault(kind: type[BaseException], fault: BaseException, trace: TracebackType | None) -> None:
    """What no one foresaw is a fault of ours: in one line, the traceback only for those who ask."""
    where = traceback.extract_tb(trace)[-1:] if trace else []
    place = "".join(f" at {Path(frame.filename).name}:{frame.lineno}" for frame in where)
    reason = " ".join(str(fault).split())[:300]
    _tell(f"ktplan stumbled: {kind.__name__}{place}: {reason}", "report this; KTPLAN_DEBUG=1 shows more", 1)


def _tell(message: str, hint: str | None, code: int) -> int:
    click.echo(f"error: {message}", err=True)
    if hint:
        click.echo(f"hint:  {hint}", err=True)
    return code
