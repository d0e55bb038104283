"""Which cores are the engine's and which the client's."""

import pytest

from conf.schema import Config, Engine, Hardware, HardwareKind
from workers.cores import Core, client_cores, engine_cores, topology


def host(*, physical: int, siblings: int = 1, nodes: int = 1) -> list[Core]:
    """Linux order: first all first siblings, then all second ones; nodes split the physical cores evenly."""
    return [
        Core(id=sibling * physical + core, physical=(0, core), node=core * nodes // physical)
        for sibling in range(siblings)
        for core in range(physical)
    ]


def cell(*, kind=HardwareKind.cpu, **engine) -> Config:
    return Config(engine=Engine(**engine), hardware=Hardware(kind=kind))


def split(config, cores, machine="x86_64"):
    return (
        engine_cores(config, cores=cores, machine=machine),
        client_cores(config, cores=cores, machine=machine),
    )


def test_two_cores_are_shared_as_the_engine_shares_them():
    """vLLM 0.31 and 0.32 log core ids=[0], reserved_cpus=[1] on such a host."""
    assert split(cell(), host(physical=2)) == ((0,), (1,))


def test_siblings_of_compute_cores_are_not_the_clients():
    """4 physical cores, 8 logical: compute on 4, 5, 6; 3 and 7 are free."""
    assert split(cell(), host(physical=4, siblings=2)) == ((4, 5, 6), (3, 7))


def test_machines_without_siblings_use_every_core():
    assert split(cell(), host(physical=4), machine="aarch64") == ((0, 1, 2), (3,))


def test_one_rank_per_node_reserves_one_core_each():
    config = cell(tensor_parallel_size=2)
    assert split(config, host(physical=8, nodes=2)) == ((0, 1, 2, 4, 5, 6), (3, 7))


def test_a_single_core_leaves_none_to_the_client():
    assert split(cell(), host(physical=1)) == ((0,), None)


@pytest.mark.parametrize(
    ("binding", "expected"),
    [("0,2-3", ((0, 2, 3), (1,))), ("0|1", ((0, 1), (2, 3))), ("nobind", (None, None))],
)
def test_an_explicit_binding_counts(binding, expected):
    assert split(cell(env={"VLLM_CPU_OMP_THREADS_BIND": binding}), host(physical=4)) == expected


def test_more_reserved_cores_are_the_clients():
    config = cell(env={"VLLM_CPU_NUM_OF_RESERVED_CPU": "2"})
    assert split(config, host(physical=4)) == ((0, 1), (2, 3))


def test_beside_a_gpu_the_client_takes_the_last_quarter():
    assert split(cell(kind=HardwareKind.cuda), host(physical=16)) == (None, (12, 13, 14, 15))


def test_this_host_has_a_topology():
    assert topology()
