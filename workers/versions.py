"""What a version string says, and what it does not: a checkout's number is not comparable with a release's."""

import re

from packaging.version import InvalidVersion, Version

_COMMIT = re.compile(r"[+.]g([0-9a-f]{7,40})\b")


def commit_of(version: str | None) -> str | None:
    """The commit that a version string carries (``0.1.dev7557+g977180c`` → ``977180c``), or None."""
    match = _COMMIT.search(version or "")
    return match[1] if match else None


def same_commit(one: str, other: str) -> bool:
    """True if the shorter spelling is the beginning of the longer one."""
    short, long = sorted((one.lower(), other.lower()), key=len)
    return long.startswith(short)


def same_release(requested: str, reported: str) -> bool:
    """True if a server's version is the release that was asked for.

    A local part that names a build (``+cpu``, ``+cu128``) is the same release; one that names a commit is a checkout
    and is not, unless it was asked for literally.
    """
    if requested == reported:
        return True
    if commit_of(reported) is not None:
        return False
    try:
        wanted, given = Version(requested), Version(reported)
    except InvalidVersion:
        return False
    return Version(wanted.public) == Version(given.public) and wanted.local is None
