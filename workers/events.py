"""What a running launch tells the driver: plain frozen values that any transport can carry.

``Phase`` says what a slot is doing, ``CellFinished`` and ``CellFailed`` carry everything a cell left behind (files as
bytes, since the slot may live on another node), ``LaunchFinished`` says where the time went.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conf.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSpec:
    """One cell as a slot sees it. ``swept``: dotted names of the settings that are axes of its sweep."""

    key: str
    config: Config
    swept: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One engine start and the cells it serves, in order. ``base_env`` is the driver's environment."""

    key: str
    cells: tuple[CellSpec, ...]
    base_env: Mapping[str, str]
    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The slot entered a phase: environment, model, clean, start, probe, warm-up, measure, stop. ``cell`` is its key."""

    name: str
    cell: str | None = None
    detail: str = ""
    done: int | None = None  # of ``total``; both None when the phase has no measurable progress
    total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFinished:
    """A cell was measured; ``payload`` is the part of result.json that the slot knows."""

    cell: str
    payload: Mapping[str, Any]
    files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFailed:
    """A cell could not be measured; no metric exists for it."""

    cell: str
    cause: str
    message: str
    log_tail: str = ""
    traceback: str = ""
    retryable: bool = False
    timing: Mapping[str, float | None] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFinished:
    """The launch is over. Seconds by phase; None = did not happen.

    Its processes are gone, unless ``problem`` says which are not.
    """

    timing: Mapping[str, float | None]
    problem: str | None = None


Event = Phase | CellFinished | CellFailed | LaunchFinished
