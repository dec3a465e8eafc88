"""The one exception a user meets: a message that names the thing, what was expected, and what mends it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A fault in what we were given (an option, a recipe, a file, a data set), not in this program.

    The command line prints the message on one line, without a traceback, and exits with code 2. Write it so
    that it names the thing, what was expected, and the command or edit that mends it.
    """

    def __init__(self, message: str) -> None:
        # torch raises a data worker's error anew, with the worker's traceback as its text: only our line is kept.
        super().__init__(message.rpartition("mae_bench.errors.UserError: ")[2])


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest of ``known``, or an empty string when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""
