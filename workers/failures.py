"""Why a server did not start, read from its log: the class decides whether waiting or another port can help."""

import re

# In this order: a specific reason beats a general one that may only be a consequence or a warning.
DOES_NOT_FIT = re.compile(
    r"No available memory for the cache blocks"
    r"|larger than the available KV cache memory"
    r"|larger than the maximum number of tokens that can be stored in KV cache"
    r"|CUDA out of memory"
    r"|CUDA error: out of memory",
)
DEVICE_BUSY = re.compile(r"on startup\s+is less than desired (?:GPU|CPU) memory utilization")
PORT_TAKEN = re.compile(r"\[Errno 98\]|EADDRINUSE|[Aa]ddress already in use")
PLUGIN_FAILED = re.compile(r"the servelab plugin (?:is not installed everywhere|cannot be installed)")
ENVIRONMENT_BROKEN = re.compile(
    r"^(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?(?:ModuleNotFoundError|ImportError|importlib\.metadata\.PackageNotFoundError): "
    r"|version `GLIBC(?:XX)?_[\d.]+' not found",
    re.MULTILINE,
)

ANY_ERROR = re.compile(
    r"^(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?(?:[\w.]+\.)?\w*(?:Error|Exception): ", re.MULTILINE
)
PREFIX = re.compile(r"^(?:\([^)]*\) )?(?:[A-Z]+ [^\]]*\] )?")
LONGEST_REASON = 400

PATTERNS = {
    "does_not_fit": DOES_NOT_FIT,
    "device_busy": DEVICE_BUSY,
    "port_taken": PORT_TAKEN,
    "plugin_failed": PLUGIN_FAILED,
    "environment_broken": ENVIRONMENT_BROKEN,
}

REMEDIES = {
    "does_not_fit": "ask for less: kv.memory_bytes must hold one request of engine.max_model_len tokens, and weights plus cache the device",
    "device_busy": "another process holds the device's memory; wait for it or end it",
    "port_taken": "another program took the port; the next try uses another one",
    "plugin_failed": "this engine's release does not fit our plugin (kernels/engine); see the log",
    "environment_broken": "build the engine's environment again, or correct the path named here",
    "start_timeout": "raise hardware.start_timeout_s if the model only needs longer",
    "generation_failed": "see the server's answer and its log",
    "died": "see the log",
}


def classify_failure(log_text: str, *, exit_code: int | None, timed_out: bool) -> str:
    """The ``cause`` of :class:`~workers.errors.EngineStartError`.

    ``exit_code`` is None while the process lives. A server that was too late but logged why it cannot start (a dead
    engine behind a living front end) gets the reason, not ``start_timeout``; import errors are often caught and only
    logged, so they count only if the process ended with an error.
    """
    for cause, pattern in (
        ("does_not_fit", DOES_NOT_FIT),
        ("device_busy", DEVICE_BUSY),
        ("port_taken", PORT_TAKEN),
        ("plugin_failed", PLUGIN_FAILED),
    ):
        if pattern.search(log_text):
            return cause
    if exit_code not in {None, 0} and ENVIRONMENT_BROKEN.search(log_text):
        return "environment_broken"
    return "start_timeout" if timed_out else "died"


def failure_reason(log_text: str, *, cause: str) -> str | None:
    """The log line that stands for the cause, without the engine's prefix; None if there is none.

    Engines print the reason first and then long consequences, so the first such line counts, not the last.
    """
    found = PATTERNS.get(cause, ANY_ERROR).search(log_text)
    if found is None:
        return None
    start = log_text.rfind("\n", 0, found.start() + 1) + 1
    line = log_text[start:].partition("\n")[0]
    return PREFIX.sub("", line)[:LONGEST_REASON].strip()
