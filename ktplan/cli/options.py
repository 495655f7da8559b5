"""Options and argument types that several commands share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from ktplan.cli.output import Output
from ktplan.errors import BadUsage
from ktplan.units import parse_bytes, parse_tokens

F = TypeVar("F", bound=Callable[..., Any])


class ByteSize(click.ParamType[int]):
    """`18GiB`, `18G` (binary), `18GB` (decimal)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except BadUsage as fault:
            self.fail(f"{fault.message}; {fault.hint}", param, ctx)


class TokenCount(click.ParamType[int]):
    """`4096`, `16k` (16,000), `16K` (16,384)."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_tokens(value)
        except BadUsage as fault:
            self.fail(f"{fault.message}; {fault.hint}", param, ctx)


class FiniteNumber(click.FloatRange):
    """A number in a range; `nan` and `inf` are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"'{value}' is not a finite number", param, ctx)
        return number


class _ModelPath(click.ParamType[Path]):
    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from ktplan.model import locate

        return value if isinstance(value, Path) else locate(value)


def model_word(model: Path) -> str:
    """What a user types to name this model again, for the hint that shows the next command."""
    from ktplan.model.embedded import TINY

    return "tiny" if model == TINY else str(model)


def model_argument(function: F) -> F:
    """MODEL: a folder, an id in the local Hugging Face cache, or `tiny`; the command gets `model: Path`."""
    return click.argument("model", type=_ModelPath())(function)


def optional_model_argument(function: F) -> F:
    """MODEL where another option can name it: `model: Path | None`."""
    return click.argument("model", type=_ModelPath(), required=False)(function)


class ManyFiles(click.Option):
    """`--dataset A B C --other`: an option that takes all words up to the next option; may also be repeated."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        own = next(parser._long_opt[name] for name in self.opts if name in parser._long_opt)
        take_one = own.process

        def take_all(value: str, state: Any) -> None:
            take_one(value, state)
            while state.rargs and not state.rargs[0].startswith("-"):
                take_one(state.rargs.pop(0), state)

        own.process = take_all


def dataset_option(*, required: bool = True) -> Callable[[F], F]:
    """`--dataset FILE…` as `dataset: tuple[Path, ...]`; `corpus:profile` and `corpus:test` name the embedded text."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def with_files(*args: Any, dataset: tuple[str, ...], **kwargs: Any) -> Any:
            return function(*args, dataset=text_files("--dataset", dataset), **kwargs)

        return click.option(
            "--dataset",
            cls=ManyFiles,
            multiple=True,
            required=required,
            metavar="FILE...",
            help='Text (.txt) or documents (.jsonl with a "text" field); several files may follow. '
            "'corpus:profile' and 'corpus:test' name the embedded text.",
        )(with_files)  # type: ignore[return-value]  # click's decorators keep the function

    return decorate


def text_files(option: str, names: Sequence[str]) -> tuple[Path, ...]:
    """The files that an option names; `corpus:profile` and `corpus:test` are the embedded ones."""
    from ktplan.model.embedded import corpus_files

    files: list[Path] = []
    for name in names:
        if name.startswith("corpus:"):
            files += corpus_files(name.removeprefix("corpus:"))
        else:
            path = Path(name)
            if not path.is_file():
                what = "is a folder" if path.is_dir() else "is no file" if path.exists() else "does not exist"
                raise BadUsage(f"{option} {name} {what}", hint="name text or jsonl files")
            files.append(path)
    return tuple(files)


def warn_if_crowded(threads: int | None, out: Output) -> None:
    """Tells when --threads asks for more than the cores there are; they would wait for each other."""
    from ktplan.hardware import oversubscribed

    warning = oversubscribed(threads) if threads else None
    if warning:
        out.warn(warning)


def output_options(function: F) -> F:
    """Adds --json and -q; the command gets `out: Output`."""

    @functools.wraps(function)
    def with_output(*args: Any, json_mode: bool, quiet: bool, **kwargs: Any) -> Any:
        return function(*args, out=Output(json_mode=json_mode, quiet=quiet), **kwargs)

    quiet = click.option("-q", "--quiet", is_flag=True, help="No progress and no notes.")
    as_json = click.option("--json", "json_mode", is_flag=True, help="Print one JSON object instead of text.")
    return as_json(quiet(with_output))  # type: ignore[return-value]
