"""The entry point of group ``vllm.general_plugins``: vLLM calls it in the API server, the core and every worker."""

from typing import Any

from .marks import mark

WORKER_METHOD = "servelab_worker_report"
CORE_METHOD = "servelab_core_report"


class PluginError(RuntimeError):
    """The plugin does not fit this vLLM; it must end the server, because without it nothing is known."""


def register() -> None:
    """Install the reports in this process; may be called more than once.

    Both classes are patched in every process: a forked child does not load plugins again.

    Raises:
        PluginError: this vLLM has no such class.
    """
    from . import report

    try:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.worker.worker_base import WorkerBase
    except ImportError as error:
        raise PluginError(
            f"the servelab plugin cannot be installed: {error}; this vLLM has no V1 engine core or worker base class "
            "at the place that releases 0.11 to 0.33 have it"
        ) from error
    _install(WorkerBase, WORKER_METHOD, report.worker_report)
    _install(EngineCore, CORE_METHOD, report.core_report)
    mark()


def _install(owner: Any, name: str, method: Any) -> None:
    setattr(owner, name, method)
    if getattr(owner, name, None) is not method:
        raise PluginError(f"the servelab plugin cannot be installed: {owner.__name__} does not keep {name}")
