"""A command that also has verbs: `ktplan profile MODEL ...` records, `ktplan profile merge ...` is another command."""

from __future__ import annotations

from typing import Any

import click

_VERB = "ktplan.verb"


class WithVerbs(click.Group):
    """Its own arguments and options apply unless the first word is a verb. A model of that name is `./merge`."""

    allow_extra_args = False
    allow_interspersed_args = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] in self.commands:
            ctx.meta[_VERB] = args[0]
            ctx.args = args[1:]
            return ctx.args
        return click.Command.parse_args(self, ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        verb = ctx.meta.get(_VERB)
        if verb is None:
            return click.Command.invoke(self, ctx)
        command = self.commands[verb]
        with command.make_context(verb, list(ctx.args), parent=ctx) as inner:
            return command.invoke(inner)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return click.Command.collect_usage_pieces(self, ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        raise NotImplementedError("verbs are resolved by parse_args")
