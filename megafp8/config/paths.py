"""Paths as users type them: `~` is a home folder, and nothing else in them is replaced.

A shell replaces both in its own words, but `--flag=~/x`, quotes and YAML files reach us as typed,
and the system would take the letters for the name of a folder.
"""

import os
import re
from typing import NewType

# The type of a field that holds a path; its text from flags and YAML goes through `expand_path`.
FilePath = NewType("FilePath", str)

_VARIABLE = re.compile(r"\$[A-Za-z_{(][A-Za-z0-9_]*[})]?")


def expand_path(text: str) -> str:
    """Return a path with `~` or `~user` at its beginning replaced.

    Raises:
        ValueError: with what is allowed: there is no such home folder, or a variable of a shell.
            A configuration is what its flags and files say, whatever the environment.
    """
    variable = _VARIABLE.search(text)
    if variable is not None:
        raise ValueError(
            f"a path without shell variables: write out {variable.group()}, or let a shell replace "
            "it (not in single quotes)"
        )
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError(f"an existing user's home folder; a folder of that name here is ./{text}")
    return path
