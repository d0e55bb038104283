"""The command line: what it accepts, what it says, what it calls."""

import sys
from types import ModuleType

import pytest
from fakes.composed import cells_of
from omegaconf import OmegaConf

from conf.keys import plain
from conf.schema import COMMAND_KEYS
from orchestrator import cli, plan


@pytest.fixture(autouse=True)
def nothing_is_built(monkeypatch):
    """Environments count as ready."""
    module = ModuleType("workers.environment")
    module.is_ready = lambda _engine, *, kind, cache: True
    monkeypatch.setitem(sys.modules, "workers.environment", module)


@pytest.fixture
def calls(monkeypatch):
    """What was handed to the modules that run things."""
    seen = []

    def module(name, function, value):
        fake = ModuleType(name)
        setattr(fake, function, lambda *args, **named: seen.append((function, args, named)) or value)
        monkeypatch.setitem(sys.modules, name, fake)

    module("orchestrator.run", "run_sweep", 3)
    module("orchestrator.rerun", "rerun", 4)
    module("orchestrator.relog", "relog", 5)
    return seen


@pytest.fixture
def stored(tmp_path):
    """A cell.yaml as a sweep leaves it."""
    cell = cells_of("+sweep=ttft_grid")[3]
    values = {key: value for key, value in plain(cell.config).items() if key not in COMMAND_KEYS}
    path = tmp_path / "cell.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(values)))
    return cell, path


def error_of(capsys, *argv):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert len(err.splitlines()) < 15
    return err


def test_help_lists_groups_options_and_examples(capsys):
    """One screen; options of every group, sweeps included."""
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "engine: vllm_0_25, vllm_0_31, vllm_0_32" in text
    sweeps = sorted(path.stem for path in (cli.CONFIG_DIR / "sweep").glob("*.yaml"))
    assert f"sweep: {', '.join(sweeps)}" in text
    assert "python -m orchestrator +sweep=ttft_grid dry_run=true" in text


def test_a_dry_run_prints_the_plan_and_starts_nothing(capsys, calls):
    """Cells, launches, minutes."""
    assert cli.main(["+sweep=ttft_grid", "dry_run=true"]) == 0
    assert "8 cells in 4 launches on 1 slot, about" in capsys.readouterr().out
    assert calls == []


def test_a_sweep_is_handed_over_with_its_name(calls):
    """The exit code is that of the run."""
    assert cli.main(["+sweep=smoke"]) == 3
    ((function, (cells, config), _),) = calls
    assert (function, len(cells), config.sweep.name) == ("run_sweep", 2, "smoke")
    assert {cell.config.sweep.name for cell in cells} == {"smoke"}


@pytest.mark.parametrize(
    ("argv", "name"),
    [([], "single"), (["kv=fp8"], "single"), (["load.rate_per_s=1,2"], "adhoc"), (["sweep.name=x"], "x")],
)
def test_commands_without_a_sweep_file_have_a_name(calls, argv, name):
    """A single run is a sweep of one cell."""
    cli.main(argv)
    assert calls[0][1][1].sweep.name == name


def test_axes_from_the_command_line_are_split_only_outside_of_quotes():
    """``key=a,b`` is an axis, a quoted comma is text (field case F2)."""
    arguments = cli.parse(["kv=bf16,fp8", "model.revision='a,b=c'", "load.rate_per_s=1,2.5", "seed=4"])
    assert arguments.axes == {"kv": ["bf16", "fp8"], "load.rate_per_s": [1, 2.5]}
    assert arguments.overrides == ("model.revision='a,b=c'", "seed=4")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-m", "+sweep=smoke"], "-m (multirun) is not used here"),
        (["kv.dtype=int4:g=32,sym"], "cannot read the override kv.dtype=int4:g=32,sym"),
        (["foo"], "cannot read 'foo': an override is key=value or group=option"),
        (["load.laod=3"], "unknown key 'load.laod': load has no 'laod', allowed: arrival, rate_per_s"),
        (["load.rate_per_s=fast"], "load.rate_per_s must be a number, got 'fast'"),
        (["load.rate_per_s=-1"], "load.rate_per_s must be > 0, got -1.0"),
        (["load.rate_per_s=nan"], "load.rate_per_s must be > 0, got nan"),
        (["load.rate_per_s=1,fast"], "must be a number, got 'fast' (sweep axis load.rate_per_s)"),
        (["load.rate_per_s=range(1,3)"], "give the values of an axis one by one"),
        (["seed=1.5"], "seed must be an integer, got 1.5"),
        (["engine.commit=1234567"], "engine.commit must be text"),
        (["~load.duration_s"], "keys cannot be deleted"),
        (["engine=nope"], "Could not find 'engine/nope'"),
        (["+sweep=nope"], "Could not find 'sweep/nope'"),
        (["sweep=smoke"], "use +sweep=smoke"),
        (["+sweep.grid.lod=[1]"], "unknown key 'lod'"),
        (["sweep.name=a/b"], "sweep.name must be"),
        (["--config-dir", "/nowhere"], "--config-dir must be an existing folder, got '/nowhere'"),
        (["--config-path", "/nowhere"], "only --config-dir, --config-name"),
        (["from_file=missing.yaml"], "from_file must be an existing cell.yaml"),
        (["relog=missing"], "relog must be an existing folder of runs"),
        (["from_file=a", "relog=b"], "from_file and relog are two commands"),
        (["sparsity=blasst"], "sparsity.method must be dense, got 'blasst'"),
        (
            ["+sweep=ttft_grid", "load=constant"],
            "load=constant sets load.arrival, but so does sweep=ttft_grid",
        ),
    ],
)
def test_what_cannot_be_run_is_one_message_and_exit_code_2(capsys, calls, argv, message):
    """No traceback, no Hydra advice, nothing started."""
    assert message in error_of(capsys, *argv)
    assert calls == []


def test_a_missing_option_lists_the_others_without_noise(capsys):
    """The search path is Hydra's business."""
    error = error_of(capsys, "engine=nope")
    assert "vllm_0_31" in error
    assert "provider" not in error
    assert "HYDRA_FULL_ERROR" not in error


def test_a_stored_cell_runs_again_with_its_identity(calls, stored):
    """``from_file`` gives the same key, and overrides come on top."""
    cell, path = stored
    assert cli.main([f"from_file={path}"]) == 4
    assert cli.main([f"from_file={path}", "load.rate_per_s=9", "engine=vllm_0_25"]) == 4
    (_, (first,), named), (_, (second,), _) = [(f, a[:1], n) for f, a, n in calls]
    assert first.key == cell.key
    assert named["original"] == path
    assert (second.config.load.rate_per_s, second.config.engine.version) == (9.0, "0.25.0")
    assert second.config.kv == cell.config.kv


def test_a_stored_cell_says_what_to_measure_not_how_to_run(calls, stored, tmp_path, monkeypatch):
    """Folders and addresses in the file are those of another day."""
    _, path = stored
    monkeypatch.chdir(tmp_path)
    path.write_text(path.read_text() + "runs_dir: /old/runs\nretries: 9\n")
    cli.main([f"from_file={path}", "retries=2"])
    config = calls[0][1][1]
    assert (config.runs_dir, config.retries, config.sweep.name) == (str(tmp_path / "runs"), 2, "rerun")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("load: {ratex: 3}", "unknown key 'load.ratex'"),
        ("[1, 2]", "got a list"),
        ("load: {rate_per_s: fast}", "could not be converted to Float"),
        ("engine: {name: e}", "these keys need a value: engine.version, model.name, workload.name"),
    ],
)
def test_a_damaged_cell_file_is_refused(capsys, tmp_path, text, message):
    """The message names the key."""
    (tmp_path / "cell.yaml").write_text(text)
    assert message in error_of(capsys, f"from_file={tmp_path}/cell.yaml")


def test_one_stored_cell_is_one_cell(capsys, stored):
    """Axes belong to sweeps."""
    assert "got the axes load.rate_per_s" in error_of(capsys, f"from_file={stored[1]}", "load.rate_per_s=1,2")


def test_the_native_form_runs_a_stored_cell(calls, stored, tmp_path, monkeypatch):
    """``--config-dir DIR --config-name cell`` gives the same key; overrides work; no folder is left behind."""
    cell, path = stored
    monkeypatch.chdir(tmp_path)
    native = ["--config-dir", str(path.parent), "--config-name", "cell"]
    assert cli.main(native) == 3
    assert cli.main([*native, "load.rate_per_s=9", "retries=2"]) == 3
    first, second = (args for _, args, _ in calls)
    assert [c.key for c in first[0]] == [cell.key]
    assert (second[0][0].config.load.rate_per_s, second[1].retries) == (9.0, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cell.yaml"]


@pytest.fixture
def own_folder(tmp_path):
    """A user's folder with an engine and a sweep of their own."""
    engine = (cli.CONFIG_DIR / "engine" / "vllm_0_31.yaml").read_text().replace("vllm_0_31", "mine")
    for name, text in {
        "engine/mine.yaml": engine,
        "sweep/own.yaml": "# @package _global_\nsweep:\n  name: own\n  grid:\n    engine: [mine, vllm_0_32]\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_users_folder_adds_engines_and_sweeps(calls, own_folder, capsys):
    """Theirs and ours in one sweep, and in the help."""
    assert cli.main(["--config-dir", str(own_folder), "+sweep=own"]) == 3
    assert [cell.config.engine.name for cell in calls[0][1][0]] == ["mine", "vllm_0_32"]
    assert cli.main(["--config-dir", str(own_folder), "--help"]) == 0
    assert "engine: mine, vllm_0_25" in capsys.readouterr().out


def test_a_group_option_that_the_sweep_overrules_is_refused(own_folder, capsys):
    """``kv=fp8`` beside an axis over ``kv.dtype`` would be silently lost; keys replace axes, options do not."""
    text = "# @package _global_\nsweep:\n  name: two\n  grid:\n    kv.dtype: [bfloat16, fp8]\n"
    (own_folder / "sweep" / "two.yaml").write_text(text)
    argv = ["--config-dir", str(own_folder), "+sweep=two", "dry_run=true"]
    assert "kv=fp8 sets kv.dtype, but so does sweep=two, which wins" in error_of(capsys, *argv, "kv=fp8")
    assert cli.main([*argv, "kv.dtype=fp8"]) == 0
    assert "1 cell in 1 launch" in capsys.readouterr().out


def test_a_users_option_cannot_hide_ours(own_folder, capsys):
    """A file with a built-in option's name would be ignored by Hydra; it is an error instead."""
    (own_folder / "engine" / "vllm_0_32.yaml").write_text("name: x")
    assert "has the name of a built-in option" in error_of(capsys, "--config-dir", str(own_folder))


def test_relog_gets_an_absolute_folder(calls, tmp_path, monkeypatch):
    """Relative to where the command was given."""
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["relog=runs"]) == 5
    assert calls[0][1][0] == tmp_path / "runs"


def test_printed_configurations_are_hydras(capsys, monkeypatch):
    """``--cfg job`` shows every key with its value."""
    monkeypatch.setattr(sys, "argv", ["servelab", "--cfg", "job", "kv=fp8"])
    assert cli.main() == 0
    assert "dtype: fp8" in capsys.readouterr().out


OPTIONS = sorted(path.relative_to(cli.CONFIG_DIR) for path in cli.CONFIG_DIR.glob("*/*.yaml"))
# What an option leaves for the user to say; {file} and {folder} exist.
NEEDS = {
    "workload/sharegpt": ["workload.path={file}"],
    "workload/lmsys": ["workload.path={file}"],
    "workload/mt_bench": ["workload.path={file}"],
    "workload/trace_lengths": ["load=trace_azure", "load.trace.path={file}"],
    "load/trace_azure": ["load.trace.path={file}"],
    "load/trace_mooncake": ["load.trace.path={file}"],
    "model/hub": ["model.id=owner/name"],
    "model/path": ["model.path={folder}"],
}
REFUSED = {"sparsity/blasst": "no engine build offers sparse attention yet"}


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_every_option_composes_and_plans(option, tmp_path):
    """Each file under conf/ is a valid choice; what it needs from the user is written here."""
    file = tmp_path / "file"
    file.write_text("[]")
    group, name = option.parent.name, option.stem
    needs = [text.format(file=file, folder=tmp_path) for text in NEEDS.get(f"{group}/{name}", [])]
    argv = [f"{'+' if group == 'sweep' else ''}{group}={name}", *needs]
    refusal = REFUSED.get(f"{group}/{name}")
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            cells_of(*argv)
        return
    assert plan.plan(cells_of(*argv)).launches


def test_options_are_not_named_like_yaml_booleans():
    """``on``, ``off``, ``yes``, ``no`` and ``null`` would not be read as text."""
    assert not {path.stem for path in OPTIONS} & {"on", "off", "yes", "no", "null", "true", "false", "y", "n"}
