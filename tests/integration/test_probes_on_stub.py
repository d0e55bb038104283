"""Output sanity through the command line: who is caught, who passes, and what a launch leaves of its answers."""

import json

import pytest
from fakes.mlflow_store import FILTERS
from fakes.stub import Script
from fakes.sweeps import lab

pytestmark = FILTERS
GARBAGE = (" -", " _", " Winc", " -", " her")
# An honest engine first: its answers are the reference of the others, which serve the same weights.
SCRIPTS = {
    "honest": Script(),
    "like_fp8": Script(probe_logprob=-0.15),
    "garbage": Script(probe_words=GARBAGE, probe_logprob=-1.5),
    "sure_garbage": Script(probe_words=(" the",), probe_logprob=-0.01),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(lab, results by engine) of one sweep over four engines."""
    place = lab(tmp_path_factory.mktemp("probes"), database=False)
    for name, script in SCRIPTS.items():
        place.engine(name, script)
    place.define(grid={"engine": list(SCRIPTS)})
    done = place.run(place.mine("+sweep=s"))
    assert done.code == 0, str(done)
    assert "output probes" in done.stdout
    return place, {result["axes"]["engine"]: result for result in place.results()}


def reasons(result):
    return {reason["name"]: reason["detail"] for reason in result["verdict"]["reasons"]}


def stored(place, result):
    return json.loads(next(place.sweep().glob(f"*{result['cell_key']}/probes.json")).read_text())


def test_the_first_honest_launch_is_the_reference(ran):
    """It passes by the known continuations of the prompts; its answers are kept with the cache, by weights."""
    place, results = ran
    assert reasons(results["honest"]) == {}
    assert stored(place, results["honest"])["reference"] is None
    assert results["honest"]["metrics"]["probe/lost_nats"] is None
    [path] = (place.root / "cache" / "references").glob("*.json")
    assert json.loads(path.read_text())["model"] == path.stem == results["honest"]["model_sha256"]


def test_a_small_loss_passes(ran):
    """The same text, each token 0.05 nats less likely: fp8 or 4-bit."""
    place, results = ran
    assert reasons(results["like_fp8"]) == {}
    metrics = results["like_fp8"]["metrics"]
    assert metrics["probe/lost_nats"] == pytest.approx(0.05)
    assert metrics["probe/mean_logprob"] == pytest.approx(-0.15)
    assert metrics["probe/reference_logprob"] == pytest.approx(-0.1)
    assert metrics["probe/agreement_tokens"] == 16
    assert results["like_fp8"]["timing"]["probe_s"] > 0
    assert len(stored(place, results["like_fp8"])["replies"]) == 3


@pytest.mark.parametrize("engine", ["garbage", "sure_garbage"])
def test_garbage_is_named_whatever_the_labels_say(ran, engine):
    """Every label and every number of the run is right; only its text is not. Being sure of it does not help."""
    place, results = ran
    assert results[engine]["outcome"] == "done"
    detail = reasons(results[engine])["output_corrupt"]
    assert list(reasons(results[engine])) == ["output_corrupt"]
    assert "nats per token" in detail
    assert "' five six seven" in detail
    assert (
        results[engine]["metrics"]["probe/agreement_tokens"] < 1
    )  # one first token of three is right by chance
    assert stored(place, results[engine])["comparison"]["lost_nats"] > 1


def test_garbage_without_a_reference_is_named_too(tmp_path):
    """No launch of these weights before; nothing is kept of it. With limit inf nobody judges."""
    place = lab(tmp_path, database=False)
    place.engine("bad", SCRIPTS["garbage"])
    place.define(grid={"engine": ["bad"], "load": {"limits": {"output_nats": [1.0, float("inf")]}}})
    done = place.run(place.mine("+sweep=s"))
    assert done.code == 0, str(done)
    judged, spared = place.results()
    assert "none of 3 probes was continued" in reasons(judged)["output_corrupt"]
    assert reasons(spared) == {}
    assert not list((place.root / "cache").glob("references/*"))
