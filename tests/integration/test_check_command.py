"""``check=true`` as a person runs it: quick, one line per need, and nothing is made."""

from fakes.sweeps import lab

LINES = (
    "devices", "leftovers", "processor", "memory", "shared memory", "cache", "ports", "descriptors", "clock", "uv",
    "ray", "engine a", "model stub", "tracking",
)  # fmt: skip


def test_check_says_what_a_sweep_needs(tmp_path):
    """The engine is an executable and the model a folder, so both are ready; then the program is missing."""
    place = lab(tmp_path, database=False)
    place.engine("a")
    place.define(grid={"engine": ["a"], "load": {"rate_per_s": [40, 80]}})
    before = sorted(tmp_path.rglob("*"))
    done = place.run(place.mine("+sweep=s", "check=true"))
    assert done.code == 0, str(done)
    lines = [line for line in done.stdout.splitlines() if not line.lstrip().startswith("→")]
    assert [line[6:21].split("  ")[0].strip() for line in lines[:-1]] == list(LINES)
    assert lines[-1] == "ready for 2 cell(s)"
    assert sorted(tmp_path.rglob("*")) == before
    assert done.seconds < 10  # 1 s on an idle host
    place.engine("a", executable=["no-such-program"])
    done = place.run(place.mine("+sweep=s", "check=true"))
    assert (done.code, "bad   engine a" in done.stdout) == (1, True), str(done)
    assert "there is no program 'no-such-program'" in done.stdout
