"""A sweep of one cell, launched several times with the same requests: its spread is printed and tracked."""

import re

import pyarrow.parquet as pq
from fakes.mlflow_store import FILTERS
from fakes.stub import Script
from fakes.sweeps import cluster, lab

pytestmark = FILTERS


def test_identical_launches_give_a_noise_floor(tmp_path):
    """Three launches of the stub: the same arrivals and prompts, one line, two metrics on the sweep's run."""
    place = lab(tmp_path)
    place.engine("a", Script(ttft_s=0.02, itl_s=0.005))
    place.define(workload={"redraw": False})
    with cluster(slots=3) as address:
        done = place.run(place.mine("+sweep=s", "engine=a", "sweep.repeats=3", f"ray.address={address}"))
    assert done.code == 0, str(done)
    tables = [pq.read_table(path) for path in sorted(place.sweep().glob("*/arrivals.parquet"))]
    assert len(tables) == 3
    assert all(table.equals(tables[0]) for table in tables)
    pattern = r"noise floor, 3 launches of one cell: TTFT p50 (\S+) ms, CV (\S+) %, max/min (\S+), TPOT mean (\S+) ms"
    found = re.search(pattern, done.stdout)
    assert found, str(done)
    assert float(found[1]) >= 20
    (parent,) = place.tracked("sweep")
    cv = parent.data.metrics["noise/ttft_cv"]
    assert abs(100 * cv - float(found[2])) <= 0.06
    assert parent.data.metrics["noise/tpot_cv"] >= 0
