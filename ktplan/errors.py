"""What a user can act on: a message, a way out, an exit code.

    KtplanError      1   failed while working
      BadUsage       2   the command line asks for something impossible
      DoesNotFit     3   memory or disk is too small
      BadInput       4   a file is damaged, foreign or too new
      MachineLacks   5   an instruction set, a GPU or a package is missing
      Interrupted  130   stopped by the user

Library code raises these and never prints; the command line prints `error:` and `hint:` and exits with the code.
"""

from __future__ import annotations

from typing import ClassVar


class KtplanError(Exception):
    """A failure to be told to the user in one line.

    `message` names the thing and the value that is wrong, `hint` what to do about it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadUsage(KtplanError):
    """The arguments cannot be right together, or name something that must not be touched."""

    exit_code = 2


class DoesNotFit(KtplanError):
    """Memory or disk is too small; the message gives both numbers."""

    exit_code = 3


class BadInput(KtplanError):
    """A file is damaged, belongs to another model, or is newer than this program."""

    exit_code = 4


class MachineLacks(KtplanError):
    """The machine lacks an instruction set, a device or a package."""

    exit_code = 5


class Interrupted(KtplanError):
    """The user stopped the work; the message says what is left and how to go on."""

    exit_code = 130
