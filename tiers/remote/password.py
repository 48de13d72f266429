"""Where the password of a store comes from: a file or the environment, never the URL.

A command line is in every process list, in SGLang's log and in the `launch_command` of
`/server_info`, so a password in it is everybody's.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from sglang_ext.tiers.errors import TierConfigError

logger = logging.getLogger(__name__)

ENV_PASSWORD = "SGLANG_HIER_KV_REMOTE_PASSWORD"
_FLAG = "--hier-kv-remote-url"
_MAX_BYTES = 4096


def refuse_inline(login: str) -> None:
    """Refuses `USER:PASSWORD` and `:PASSWORD` in front of a host.

    Raises:
        TierConfigError: there is one; it is not in the message.
    """
    if ":" in login:
        raise TierConfigError(
            f"{_FLAG} must have no password in it, as command lines are shown by ps and"
            " /server_info; put it into a file and give ?password-file=PATH, or set"
            f" {ENV_PASSWORD}"
        )


def read_password(path: Path | None) -> str:
    """The password of a store; "" where none is given.

    Args:
        path: of `password-file`; None where the URL has none, and the environment says.

    Raises:
        TierConfigError: both are given, or the file holds no password.
    """
    given = os.environ.get(ENV_PASSWORD, "")
    if path is None:
        return _checked(given, ENV_PASSWORD) if given else ""
    if given:
        raise TierConfigError(
            f"{_FLAG} has a password-file and {ENV_PASSWORD} is set too; leave one of them out"
        )
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_MAX_BYTES).decode("utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError):
        raise TierConfigError(f"{_FLAG}: password-file must name a text that can be read") from None
    if mode & 0o077:
        logger.warning(
            "hier-kv: the password-file may be read or written by others (mode %04o); make it its "
            "owner's alone with chmod 600",
            stat.S_IMODE(mode),
        )
    return _checked(text, f"{_FLAG}: password-file")


def _checked(text: str, what: str) -> str:
    if not text or any(character in text for character in "\r\n\0"):
        raise TierConfigError(f"{what} must hold the password alone, on one line")
    return text
