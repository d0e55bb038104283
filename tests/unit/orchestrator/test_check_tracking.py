"""Whether a tracking store answers, found out without MLflow and without making one."""

import http.server
import threading
from dataclasses import replace

import pytest
from fakes.cells import fake_config

from conf.schema import Tracking
from orchestrator import check
from workers.check import Level


def found(tmp_path, uri=None):
    return check.tracking(replace(fake_config(tracking=Tracking(uri=uri)), runs_dir=str(tmp_path / "runs")))


def test_a_database_that_is_not_there_yet_is_not_made(tmp_path):
    assert found(tmp_path).level is Level.ok
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_bad(tmp_path):
    (tmp_path / "mlflow.db").write_text("no database, " * 100)
    finding = found(tmp_path)
    assert finding.level is Level.bad
    assert "not a database" in finding.text


@pytest.mark.parametrize("scheme", ["http", "postgresql"])
def test_nothing_listening_is_bad(tmp_path, scheme):
    """Port 9 of this host; a password in the address is not shown."""
    finding = found(tmp_path, f"{scheme}://user:secret@127.0.0.1:9")
    assert finding.level is Level.bad
    assert "refused" in finding.text
    assert "secret" not in finding.text


@pytest.mark.parametrize(("status", "level"), [(200, "ok"), (404, "ok"), (503, "bad")])
def test_a_server_answers(tmp_path, status, level):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert found(tmp_path, f"http://127.0.0.1:{server.server_port}").level.value == level
        thread.join()


@pytest.mark.parametrize(("given", "number"), [(None, 0), ("auto", 0), ("127.0.0.1:9", 1)])
def test_a_cluster_that_does_not_answer_is_bad(given, number):
    findings = check.ray_address(given)
    assert [finding.level for finding in findings] == [Level.bad] * number
