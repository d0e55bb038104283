"""What the world did to a run, as one small tree.

ServelabError
├── EnvironmentBrokenError   an engine environment could not be built or does not import
├── ModelUnavailableError    the weights could not be fetched, converted or read
├── EngineStartError         the server did not become ready; ``cause`` says why
│   (does_not_fit, device_busy, start_timeout, died, port_taken, environment_broken, leftover, ...)
├── EngineDiedError          the server ended during a cell
├── ClientLimitError         this host cannot carry the load (descriptors)
└── NotDrainedError          the previous load was still running when the next should start

What the user wrote raises ``ValueError`` before anything starts.
"""


class ServelabError(Exception):
    """Base of everything the world did. ``cause`` is the class name shown in summaries and tags."""

    cause: str = "error"


class EnvironmentBrokenError(ServelabError):
    """An engine environment could not be built or does not import."""

    cause = "environment_broken"


class ModelUnavailableError(ServelabError):
    """The weights could not be fetched, converted or read."""

    cause = "model_unavailable"


class EngineStartError(ServelabError):
    """The server did not become ready."""

    def __init__(self, message: str, *, cause: str, log_tail: str = "") -> None:
        super().__init__(message)
        self.cause = cause
        self.log_tail = log_tail

    @property
    def retryable(self) -> bool:
        """True for causes that waiting or another port can mend."""
        return self.cause in {"device_busy", "port_taken"}


class EngineDiedError(ServelabError):
    """The server ended during a cell."""

    cause = "died"

    def __init__(self, message: str, *, log_tail: str = "") -> None:
        super().__init__(message)
        self.log_tail = log_tail


class ClientLimitError(ServelabError):
    """This host cannot carry the load."""

    cause = "client_limit"


class NotDrainedError(ServelabError):
    """The previous load was still running when the next should start."""

    cause = "not_drained"
