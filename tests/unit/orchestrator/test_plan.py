"""Launches, their order, and the estimate."""

import io

import pytest
from fakes.composed import cells_of
from rich.console import Console

from conf.keys import replaced
from conf.schema import ArrivalKind, Config, HardwareKind, Load, Warmup
from orchestrator.plan import ENGINE_START_S, MAX_ROWS, cell_s, plan, render, warmup_s, window_s


@pytest.fixture(scope="module")
def grid():
    """Two engines' worth of KV types at two rates, two repeats, sentinels."""
    return cells_of("kv.dtype=bfloat16,fp8", "load.rate_per_s=1,2", "sweep.repeats=2", "sweep.sentinels=true")


def text_of(renderable):
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    return console.file.getvalue()


def order(planned):
    return [cell.key for launch in planned.launches for cell in launch.cells]


def test_rates_share_a_launch(grid):
    """Two KV types and two repeats are four launches of two rates each, and two sentinels."""
    planned = plan(grid, shuffle=False)
    assert [len(launch.cells) for launch in planned.launches] == [1, 2, 2, 2, 2, 1]
    assert planned.num_cells == 10


def test_sentinels_are_first_and_last_and_repeats_are_blocks(grid):
    """Shuffling stays inside a block, for any seed."""
    for seed in range(20):
        launches = plan(grid, seed=seed).launches
        configs = [launch.cells[0].config for launch in launches]
        assert [config.sentinel for config in configs] == [0, None, None, None, None, 1]
        assert [config.repeat for config in configs] == [0, 0, 0, 1, 1, 0]


def test_the_seed_decides_the_order(grid):
    """The same seed plans the same order; some other seed plans another."""
    assert order(plan(grid, seed=3)) == order(plan(grid, seed=3))
    assert len({tuple(order(plan(grid, seed=seed))) for seed in range(10)}) > 1


def test_shuffling_loses_no_cell(grid):
    """Every cell is planned once."""
    assert sorted(order(plan(grid, seed=1))) == sorted(cell.key for cell in grid)


def test_without_shuffle_the_declared_order_stays(grid):
    """``sweep.shuffle=false`` runs as written."""
    assert order(plan(grid, shuffle=False)) == [cell.key for cell in grid]


def test_nothing_to_do_is_an_empty_plan():
    """A finished sweep plans no launch."""
    assert plan([]).launches == ()
    assert "0 cells in 0 launches" in text_of(render(plan([])))


@pytest.mark.parametrize(
    ("load", "seconds"),
    [
        (Load(duration_s=25.0), 25.0),
        (Load(num_requests=20, rate_per_s=4.0), 5.0),
        (Load(num_requests=20, rate_per_s=4.0, duration_s=3.0), 3.0),
        (Load(num_requests=20, rate_per_s=float("inf"), arrival=ArrivalKind.burst), 40.0),
        (Load(arrival=ArrivalKind.trace), 600.0),
    ],
)
def test_the_window_is_the_shorter_of_count_and_duration(load, seconds):
    """A burst is guessed at 2 s a request, an endless trace at ten minutes."""
    assert window_s(load) == seconds


def test_warm_up_covers_the_shapes_below_the_longest_input():
    """128 input tokens lie behind the edge 64: two shapes and one batch, 2 s each."""
    config = Config(load=Load(warmup=Warmup(requests_per_shape=1, concurrent=4, shape_edges=[64, 256])))
    assert warmup_s(config) == 6.0


def test_a_launch_is_a_start_its_cells_and_a_stop(grid):
    """35 s start on a CPU, 3 s stop."""
    launch = plan(grid, shuffle=False).launches[1]
    cells = sum(cell_s(cell.config) for cell in launch.cells)
    assert launch.estimate_s == ENGINE_START_S[HardwareKind.cpu] + cells + 3


def test_missing_environments_are_named_and_counted_once(grid):
    """One engine, ten cells: one environment of a minute."""
    planned = plan(grid, is_ready=lambda _engine, _kind: False)
    assert (planned.environments, planned.environments_s) == (("vllm_0_32",), 60.0)
    assert plan(grid, is_ready=lambda _engine, _kind: True).environments == ()


def test_slots_share_the_launches(grid):
    """Two slots halve the launches' time, not that of the environments."""
    one = plan(grid).estimate_s
    cells = [
        type(cell)(
            config=replaced(cell.config, "hardware.engine_slots", 2),
            axes=cell.axes,
            key=cell.key,
            folder=cell.folder,
        )
        for cell in grid
    ]
    assert plan(cells).estimate_s == one / 2


def test_the_plan_is_readable(grid):
    """Launches with what they serve, environments, the total."""
    text = text_of(render(plan(grid, shuffle=False, is_ready=lambda _engine, _kind: False)))
    assert "1  bfloat16 sentinel 0  load.rate_per_s=1.0" in text
    assert "load.rate_per_s=1.0 | load.rate_per_s=2.0" in text
    assert "environments to build: vllm_0_32 (1.0 min)" in text
    assert "10 cells in 6 launches on 1 slot, about" in text


def test_long_plans_are_cut():
    """The rest is counted."""
    cells = cells_of(f"kv.memory_bytes={','.join(str(2**20 * n) for n in range(1, MAX_ROWS + 4))}")
    assert "... and 3 more launches" in text_of(render(plan(cells)))


def test_cells_share_no_engine_whose_prefix_cache_is_on():
    """The second of two rates would find the first one's prompts cached; so each gets a launch of its own."""
    cells = cells_of("load.rate_per_s=1,2", "kv.prefix_caching=true")
    assert [len(launch.cells) for launch in plan(cells).launches] == [1, 1]
    assert [len(launch.cells) for launch in plan(cells_of("load.rate_per_s=1,2")).launches] == [2]
