"""Shared by all tests: ``fakes`` is importable, and a unit test cannot start Ray."""

import importlib.machinery
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def _refuse(*_args, **_kwargs):
    raise AssertionError("a unit test called ray.init; move it to tests/integration")


class _RayGuard:
    """Import hook: ``ray`` imported during a unit test comes with an ``init`` that raises."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "ray":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.init = _refuse

        spec.loader.exec_module = exec_module
        return spec


@pytest.fixture(autouse=True)
def no_ray_in_unit_tests(request, monkeypatch):
    """Unit tests decide things; they start nothing."""
    if HERE / "unit" not in request.path.parents:
        real = getattr(sys.modules.get("ray"), "init", None)
        if real is _refuse:
            # A unit test imported ray earlier in this process; give integration tests the real function back.
            from ray._private.worker import init

            monkeypatch.setattr(sys.modules["ray"], "init", init)
        return
    if "ray" in sys.modules:
        monkeypatch.setattr(sys.modules["ray"], "init", _refuse)
        return
    monkeypatch.setattr(sys, "meta_path", [_RayGuard, *sys.meta_path])
