"""The limit of open file descriptors, which is a limit of open streams."""

import resource

from workers.errors import ClientLimitError

# Interpreter, event loop, timers, pipes, the files of the run.
MARGIN = 64


def ensure_descriptors(num_streams: int) -> None:
    """Make room for ``num_streams`` connections at once, raising the soft limit where the hard limit lets us.

    Raises:
        ClientLimitError: the hard limit is below the need; raised before anything is sent.
    """
    need = num_streams + MARGIN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _covers(soft, need):
        return
    if not _covers(hard, need):
        raise ClientLimitError(
            f"{num_streams} streams at once need {need} file descriptors, the hard limit is {hard}: "
            "raise it (ulimit -Hn) or set load.max_concurrency"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def _covers(limit: int, need: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= need
