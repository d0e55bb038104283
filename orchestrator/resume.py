"""Which cells a command runs: a pure decision over the results on disk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from conf.schema import Rerun
from orchestrator.store import state


class _Keyed(Protocol):
    @property
    def key(self) -> str: ...


CellT = TypeVar("CellT", bound=_Keyed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Generic[CellT]):
    """``done`` keep their results, ``todo`` run now; both in the order of the sweep.

    ``num_failed`` and ``num_invalid`` count all results of that kind, ``num_again`` those that are run again.
    """

    done: tuple[CellT, ...]
    todo: tuple[CellT, ...]
    num_failed: int
    num_invalid: int
    num_again: int

    def sentence(self) -> str:
        """What is kept and what runs, e.g. ``4 done before (1 failed), 8 to run``."""
        bad = [f"{n} {name}" for n, name in ((self.num_failed, "failed"), (self.num_invalid, "invalid")) if n]
        kept = f" ({', '.join(bad)}; rerun=failed runs them again)" if bad and not self.num_again else ""
        again = f" ({self.num_again} of them again)" if self.num_again else ""
        return f"{len(self.done)} done before{kept}, {len(self.todo)} to run{again}"


def decide(
    cells: Sequence[CellT], results: Mapping[str, Mapping[str, Any]], *, rerun: Rerun
) -> Decision[CellT]:
    """Split cells by whether their result (by cell key) stays.

    A cell without a result always runs. A failed or invalid one stays, unless ``rerun`` is ``failed`` or ``all``; a
    valid one stays, unless ``rerun`` is ``all``.
    """
    states = {cell.key: state(results.get(cell.key)) for cell in cells}
    again = {Rerun.none: (), Rerun.failed: ("failed", "invalid"), Rerun.all: ("valid", "failed", "invalid")}[
        rerun
    ]
    todo = tuple(cell for cell in cells if states[cell.key] in {"not_started", *again})
    done = tuple(cell for cell in cells if states[cell.key] not in {"not_started", *again})
    found = list(states.values())
    return Decision(
        done=done,
        todo=todo,
        num_failed=found.count("failed"),
        num_invalid=found.count("invalid"),
        num_again=sum(states[cell.key] != "not_started" for cell in todo),
    )
