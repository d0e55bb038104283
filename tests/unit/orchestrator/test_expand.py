"""From grids to cells: order, types, replacement, refusals."""

import re

import pytest
from fakes.composed import cells_of

from conf.schema import Length, LengthKind
from orchestrator.expand import MAX_SLUG, flatten

LONG = "x" * 400
SAFE = re.compile(r"[A-Za-z0-9._+-]{1,255}")


def axes(cells):
    return [tuple(cell.axes.values()) for cell in cells]


def test_without_a_grid_there_is_one_cell():
    """A plain command is a sweep of one."""
    (cell,) = cells_of()
    assert dict(cell.axes) == {}
    assert cell.folder == cell.key


def test_nested_axes_multiply_in_declared_order():
    """The last axis varies fastest."""
    cells = cells_of("+sweep.grid={kv:{dtype:[bfloat16,fp8]},load:{rate_per_s:[1,2]}}")
    assert axes(cells) == [("bfloat16", 1.0), ("bfloat16", 2.0), ("fp8", 1.0), ("fp8", 2.0)]
    assert [cell.config.kv.dtype for cell in cells] == ["bfloat16", "bfloat16", "fp8", "fp8"]


def test_a_group_axis_chooses_options():
    """A top-level axis named like a group composes that option."""
    cells = cells_of("engine=vllm_0_31,vllm_0_32", "kv.dtype=fp8")
    assert [cell.config.engine.version for cell in cells] == ["0.31.0", "0.32.0"]
    assert {cell.config.kv.dtype for cell in cells} == {"fp8"}


def test_the_values_of_a_group_axis_survive_overrides_on_its_keys():
    """A key given on the command line holds for every option."""
    cells = cells_of("engine=vllm_0_31,vllm_0_32", "engine.max_num_seqs=7")
    assert [(cell.config.engine.name, cell.config.engine.max_num_seqs) for cell in cells] == [
        ("vllm_0_31", 7),
        ("vllm_0_32", 7),
    ]


def test_an_override_of_an_axis_replaces_it():
    """The command line wins over the sweep's file, with one value or with several."""
    grid = "+sweep.grid.kv.dtype=[bfloat16,fp8]"
    assert axes(cells_of(grid)) == [("bfloat16",), ("fp8",)]
    (cell,) = cells_of(grid, "kv.dtype=fp8")
    assert (cell.config.kv.dtype, dict(cell.axes)) == ("fp8", {})
    assert axes(cells_of(grid, "kv.dtype=fp8,auto")) == [("fp8",), ("auto",)]
    assert len(cells_of("+sweep=ttft_grid", "engine=vllm_0_32")) == 4


def test_a_map_on_the_command_line_replaces_the_axes_in_it():
    """A whole section's override counts for each of its keys."""
    (cell,) = cells_of("+sweep.grid.kv.dtype=[bfloat16,fp8]", "kv={dtype:auto}")
    assert cell.config.kv.dtype == "auto"


def test_zipped_axes_advance_together():
    """Three pairs, not nine; the excluded one is left out."""
    assert axes(cells_of("+sweep=capacity", "kv.dtype=fp8")) == [
        (16777216, 1.0),
        (33554432, 2.0),
    ]


def test_zipped_axes_must_be_equally_long():
    """The message counts the values."""
    with pytest.raises(ValueError, match=r"equally many values: seed has 2, load\.rate_per_s has 1"):
        cells_of("sweep.zip=[{seed:[1,2],load:{rate_per_s:[1]}}]")


def test_exclude_takes_axes_options_and_other_keys():
    """A rule matches a cell if all its keys do."""
    grid = ("engine=vllm_0_31,vllm_0_32", "kv.dtype=fp8,auto")
    assert axes(cells_of(*grid, "sweep.exclude=[{engine:vllm_0_31,kv:{dtype:fp8}}]")) == [
        ("vllm_0_31", "auto"),
        ("vllm_0_32", "fp8"),
        ("vllm_0_32", "auto"),
    ]
    assert axes(cells_of(*grid, 'sweep.exclude=[{engine:{version:"0.32.0"}}]')) == [
        ("vllm_0_31", "fp8"),
        ("vllm_0_31", "auto"),
    ]
    with pytest.raises(ValueError, match="leaves no cell"):
        cells_of(*grid, "sweep.exclude=[{kv:{dtype:[fp8,auto]}}]")


def test_excluded_cells_need_not_be_valid():
    """An impossible combination may be excluded instead of being an error."""
    cells = cells_of(
        "hardware=cpu,cuda",
        "engine.tensor_parallel_size=1,2",
        "sweep.exclude=[{hardware:cpu,engine:{tensor_parallel_size:2}}]",
    )
    assert axes(cells) == [("cpu", 1), ("cuda", 1), ("cuda", 2)]


def test_repeats_and_sentinels_are_cells_of_their_own():
    """The first cell opens and closes the sweep; each repeat has its number."""
    cells = cells_of("kv.dtype=bfloat16,fp8", "sweep.repeats=2", "sweep.sentinels=true")
    assert [(cell.config.kv.dtype, cell.config.repeat, cell.config.sentinel) for cell in cells] == [
        ("bfloat16", 0, 0),
        ("bfloat16", 0, None),
        ("fp8", 0, None),
        ("bfloat16", 1, None),
        ("fp8", 1, None),
        ("bfloat16", 0, 1),
    ]
    assert len({cell.key for cell in cells}) == 6


def test_sections_can_be_an_axis():
    """A list of maps replaces the whole section by each."""
    cells = cells_of("+sweep.grid.workload.input=[{kind:fixed,value:16},{kind:uniform,min:4,max:8}]")
    assert [cell.config.workload.input for cell in cells] == [
        Length(value=16),
        Length(kind=LengthKind.uniform, min=4, max=8),
    ]


def test_interpolations_follow_an_axis():
    """A key that is defined by another is resolved for every cell."""
    cells = cells_of("model=hub", "model.id=a/one,b/two")
    assert [cell.config.model.name for cell in cells] == ["a/one", "b/two"]


def test_paths_are_absolute(monkeypatch, tmp_path):
    """Relative paths are meant from where the command was given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.json").write_text("[]")
    (cell,) = cells_of("workload=sharegpt", "workload.path=p.json")
    assert cell.config.workload.path == str(tmp_path / "p.json")
    assert cell.config.runs_dir == str(tmp_path / "runs")


def test_equal_spellings_of_an_axis_value_are_named():
    """1e-5 and 0.00001 are one value; two of it are an error, not two cells (field case F1)."""
    with pytest.raises(ValueError, match=r"load\.slo\.ttft_ms has the value 1e-05 twice, as items 1 and 2"):
        cells_of("load.slo.ttft_ms=1e-5,0.00001,1.0e-6,1e-3")
    cells = cells_of("load.slo.ttft_ms=1e-5,1.0e-6,1e-3")
    assert axes(cells) == [(1e-5,), (1e-6,), (1e-3,)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fast", "must be a number, got 'fast'"),
        ("-1", "must be > 0, got -1.0"),
        ("nan", "must be > 0, got nan"),
    ],
)
def test_a_bad_axis_value_names_the_axis(value, message):
    """Refused before anything starts (field case F1)."""
    with pytest.raises(ValueError) as caught:
        cells_of(f"load.rate_per_s=8,{value}")
    assert str(caught.value).startswith(f"load.rate_per_s {message} (sweep axis load.rate_per_s)")


def test_cells_that_are_one_measurement_are_named(tmp_path):
    """Two paths to equal bytes are one workload."""
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("[]")
    with pytest.raises(ValueError, match=r"two cells are the same measurement: .*a.json.*b.json"):
        cells_of("workload=sharegpt", f"workload.path={tmp_path}/a.json,{tmp_path}/b.json")


def test_an_axis_without_effect_is_refused():
    """The burstiness of a Poisson process changes nothing, so its cells are one measurement."""
    with pytest.raises(
        ValueError, match=r"two cells are the same .*burstiness=0.5.*burstiness=1.0.*without effect"
    ):
        cells_of("load.burstiness=0.5,1.0")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+sweep.grid.load.rate_per_s=[]", "sweep axis load.rate_per_s has no values"),
        (
            "+sweep.grid.load.laod=[1]",
            "unknown key 'load.laod': load has no 'laod', allowed: arrival, rate_per_s",
        ),
        ("+sweep.grid.engine=[0.32]", "chooses options of a group by name, got 0.32; quote it"),
        ("+sweep.grid.repeat=[1,2]", "repeat cannot be an axis: use sweep.repeats"),
        ("+sweep.grid.runs_dir=[a,b]", "runs_dir cannot be an axis: it says how a command runs"),
        ("+sweep.grid.engine=[nope]", "Could not find 'engine/nope'"),
        ("+sweep.grid.engine.version=[0.30]", "engine.version must be text, got 0.3: quote it"),
        ("sweep.zip=[{kv:{dtype:[fp8]}},{kv:{dtype:[auto]}}]", "kv.dtype is an axis twice"),
        ("sweep.zip=[{load:{slo:[{ttft_ms:1}]}},{load:{slo:{ttft_ms:[1]}}}]", "set the same keys; keep one"),
        ("sweep.exclude=[{kv:{dtpe:fp8}}]", "unknown key 'kv.dtpe'"),
        ("sweep.repeats=0", "sweep.repeats must be >= 1, got 0"),
    ],
)
def test_an_impossible_axis_is_refused(override, message):
    """One message that names the axis."""
    with pytest.raises(Exception, match=re.escape(message)):
        cells_of(override)


def test_dotted_and_nested_keys_are_one():
    """Both spellings flatten to the same axis; both at once are an error."""
    assert flatten({"kv": {"dtype": ["a"]}, "load.rate_per_s": [1]}) == {
        "kv.dtype": ["a"],
        "load.rate_per_s": [1],
    }
    with pytest.raises(ValueError, match=r"kv\.dtype is written twice"):
        flatten({"kv": {"dtype": ["a"]}, "kv.dtype": ["b"]})


@pytest.mark.parametrize("text", ["int4:g=32,sym", "a/b", "/m/a=10,b=20/x", "a|b", "[x]", "ü ö", LONG])
def test_special_characters_stay_in_the_value_and_out_of_the_folder(text):
    """A quoted value arrives unchanged; the folder's name is safe and short (field case F2)."""
    (cell,) = cells_of(f"+sweep.grid.model.revision=['{text}']")
    assert cell.config.model.revision == text
    assert cell.axes["model.revision"] == text
    assert SAFE.fullmatch(cell.folder)
    assert len(cell.folder) <= MAX_SLUG + 13


def test_values_that_differ_in_a_replaced_character_have_their_own_folders():
    """The key behind the readable part tells them apart (field case F2)."""
    cells = cells_of("+sweep.grid.model.revision=['a/b','a,b','a=b']")
    assert len({cell.folder for cell in cells}) == 3
    assert {cell.folder.rpartition("-")[0] for cell in cells} == {"a_b"}


def test_an_escaped_model_path_is_one_cell(tmp_path):
    """Commas and equals signs in a path are not axes (field case F2)."""
    path = tmp_path / "a=10,b=20" / "x"
    path.mkdir(parents=True)
    (cell,) = cells_of("model=path", f"model.path='{path}'")
    assert cell.config.model.path == str(path)


def test_the_first_cells_sections_are_shared_not_copied():
    """Sections that no axis touches are the same objects in every cell: large sweeps stay small."""
    first, second = cells_of("kv.dtype=fp8,auto")
    assert first.config.load is second.config.load
    assert first.config.kv is not second.config.kv


@pytest.mark.parametrize(
    ("override", "axis"),
    [
        ("+sweep.grid.engine.env.OMP_NUM_THREADS=['1','2']", "engine.env.OMP_NUM_THREADS"),
        ("+sweep.grid.hardware.engine_slots=[1,2]", "hardware.engine_slots"),
        ("sweep.zip=[{sparsity:{scale_factor:[1,2]},load:{rate_per_s:[1,2]}}]", "sparsity.scale_factor"),
    ],
)
def test_an_axis_that_nothing_confirms_is_refused(override, axis):
    """No rule, no axis: the message names the axis and the remedy."""
    with pytest.raises(ValueError, match=f"{axis} cannot be an axis: no rule says .* workers/rules.py"):
        cells_of(override)


def test_a_variable_that_doubles_a_setting_is_refused():
    """Newer engines do not read it, and the cell would be labelled by it (C1)."""
    with pytest.raises(ValueError, match=r"VLLM_ATTENTION_BACKEND cannot be set: engine\.attention_backend"):
        cells_of("+engine.env.VLLM_ATTENTION_BACKEND=TRITON_ATTN")
