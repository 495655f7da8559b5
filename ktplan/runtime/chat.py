"""A conversation: turns to a prompt, answers to turns, and a loop for the terminal.

The loop reads and writes through functions that it is given, so it works on a terminal, a pipe and in a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ktplan.errors import BadInput
from ktplan.runtime.engine import Engine, Generation, PromptTooLong
from ktplan.runtime.sampling import Sampling

HELP = "/help this text   /reset forget the conversation   /stats figures of the last answer   /quit leave"
_USER, _ASSISTANT = "User:", "Assistant:"


class Conversation:
    """Turns so far. With the model's chat template, or in a plain form where it has none (`plain`)."""

    def __init__(
        self, engine: Engine, *, system: str | None, sampling: Sampling, max_new_tokens: int
    ) -> None:
        self._engine, self._sampling, self._limit = engine, sampling, max_new_tokens
        self._system = system
        self.plain = getattr(engine.tokenizer, "chat_template", None) is None
        self.last: Generation | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system text."""
        self._turns = [{"role": "system", "content": self._system}] if self._system else []

    def prompt(self) -> list[int]:
        """Token ids of all turns, ready for an answer. Raises BadInput where the template refuses them."""
        if self.plain:
            return self._engine.encode(self._plain_text())
        text = _templated(self._engine.tokenizer, self._turns)
        ids: list[int] = self._engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def ask(self, text: str) -> Iterator[str]:
        """Add a user turn and stream the answer, which becomes a turn too, even when it is broken off.

        Raises PromptTooLong, leaving the conversation as it was.
        """
        self._turns.append({"role": "user", "content": text})
        try:
            self.last = self._engine.generate(
                self.prompt(),
                max_new_tokens=self._limit,
                sampling=self._sampling,
                stop=(f"\n{_USER}",) if self.plain else (),
            )
        except (PromptTooLong, BadInput):
            self._turns.pop()
            raise
        answer = ""
        try:
            for piece in self.last:
                answer += piece
                yield piece
        finally:
            self._turns.append({"role": "assistant", "content": answer})

    def _plain_text(self) -> str:
        names = {"system": "", "user": f"{_USER} ", "assistant": f"{_ASSISTANT} "}
        lines = [names[turn["role"]] + turn["content"].strip() for turn in self._turns]
        return "\n".join([*lines, _ASSISTANT])


def _templated(tokenizer: Any, turns: list[dict[str, str]]) -> str:
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as fault:
        # A template is a program of the model's: whatever it stumbles over is an answer to these turns.
        raise BadInput(
            f"the model's chat template refuses the conversation: {fault}",
            hint="some models take no --system text",
        ) from fault
    return text


def talk(
    conversation: Conversation,
    *,
    read: Callable[[], str | None],
    write: Callable[[str], None],
    say: Callable[[str], None],
    figures: Callable[[Generation], str],
) -> None:
    """Converse until `read` gives None or /quit. `write` takes the answer in pieces, `say` all else.

    An interrupt (Ctrl-C) while an answer is written stops the answer and not the conversation.
    """
    if conversation.plain:
        say(f"this model has no chat template: turns are written as '{_USER}' and '{_ASSISTANT}'")
    say(HELP)
    while (line := read()) is not None:
        text = line.strip()
        if text == "/quit":
            return
        if text.startswith("/"):
            say(_command(conversation, text, figures))
        elif text:
            _answer(conversation, text, write, say)


def _answer(
    conversation: Conversation, text: str, write: Callable[[str], None], say: Callable[[str], None]
) -> None:
    try:
        for piece in conversation.ask(text):
            write(piece)
        write("\n")
    except KeyboardInterrupt:
        write("\n")
        say("stopped")
    except PromptTooLong as fault:
        say(f"{fault.message}; /reset starts anew")


def _command(conversation: Conversation, text: str, figures: Callable[[Generation], str]) -> str:
    if text == "/help":
        return HELP
    if text == "/reset":
        conversation.reset()
        return "the conversation is forgotten"
    if text == "/stats":
        return figures(conversation.last) if conversation.last else "no answer yet"
    return f"{text.split()[0]} is not a command. {HELP}"
