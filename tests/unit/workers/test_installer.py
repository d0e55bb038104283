import subprocess
import sys

import pytest

from workers import installer
from workers.errors import EnvironmentBrokenError
from workers.installer import last_lines, pip_settings, run_process, uv_binary, uv_variables

LISTING = """\
:env:.cert='/certs.crt'
:env:.default-timeout='180'
global.extra-index-url='file:///one/simple file:///two/simple'
global.find-links='/wheels'
install.find-links='/install-wheels\\n/more'
download.find-links='/not-ours'
global.constraint='/constraints.txt'
"""


def test_pip_settings_are_read_from_its_listing():
    """``install`` outranks ``global``; settings of other commands are not ours."""
    assert pip_settings(LISTING, environ={}) == {
        "cert": "/certs.crt",
        "timeout": "180",
        "extra-index-url": "file:///one/simple file:///two/simple",
        "find-links": "/install-wheels\n/more",
        "constraint": "/constraints.txt",
    }


def test_variables_of_pip_outrank_its_files():
    """PIP_FIND_LINKS replaces the file's value, also where pip itself is missing."""
    assert pip_settings(LISTING, environ={"PIP_FIND_LINKS": "/env"})["find-links"] == "/env"
    assert pip_settings("", environ={"PIP_INDEX_URL": "u", "PIP_TRUSTED_HOST": ""}) == {"index-url": "u"}


def test_settings_become_variables_of_uv():
    """Every source of packages is handed on in uv's spelling; several find-links are separated by commas."""
    settings = {
        "find-links": "/a\n/b", "index-url": "i", "extra-index-url": "e f", "trusted-host": "h",
        "cert": "/c", "timeout": "9", "constraint": "/ignored",
    }  # fmt: skip
    assert uv_variables(settings, environ={"HOME": "/h"}) == {
        "HOME": "/h",
        "UV_FIND_LINKS": "/a,/b",
        "UV_DEFAULT_INDEX": "i",
        "UV_EXTRA_INDEX_URL": "e f",
        "UV_INSECURE_HOST": "h",
        "SSL_CERT_FILE": "/c",
        "UV_HTTP_TIMEOUT": "9",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_NO_PROGRESS": "1",
    }


def test_a_users_own_variable_of_uv_wins():
    """Somebody who speaks to uv directly is not overruled by pip's settings."""
    result = uv_variables({"find-links": "/pip"}, environ={"UV_FIND_LINKS": "/uv", "UV_CACHE_DIR": "/c"})
    assert (result["UV_FIND_LINKS"], result["UV_CACHE_DIR"]) == ("/uv", "/c")


def test_this_programs_python_settings_stay_here():
    """The engine's venv must not see this program's venv nor its import path."""
    environ = {"VIRTUAL_ENV": "/v", "PYTHONPATH": "/p", "PYTHONHOME": "/h"}
    assert not set(uv_variables({}, environ=environ)) & set(environ)


def test_a_missing_pip_is_reported(monkeypatch):
    """Without pip only variables are read, and the user is told."""
    failed = subprocess.CompletedProcess([], 1, "", "No module named pip")
    monkeypatch.setattr(installer.subprocess, "run", lambda *args, **kwargs: failed)
    lines = []
    result = installer.installer_environment(progress=lines.append, environ={"PIP_FIND_LINKS": "/w"})
    assert result["UV_FIND_LINKS"] == "/w"
    assert "pip is not installed" in lines[0]


def test_a_missing_uv_is_named_with_its_remedy(monkeypatch):
    """The package can be there without its binary."""

    def missing():
        raise FileNotFoundError("/venv/bin/uv")

    monkeypatch.setattr(installer.uv, "find_uv_bin", missing)
    with pytest.raises(EnvironmentBrokenError, match="pip install uv"):
        uv_binary()


def test_both_outputs_and_the_exit_code_come_back(tmp_path):
    """A process runs with the given environment only and shares the lock's descriptor."""
    code = (
        "import os,sys; os.fstat(int(os.environ['FD'])); print('o'); print('e', file=sys.stderr); sys.exit(3)"
    )
    with (tmp_path / "lock").open("w") as file:
        result = run_process(
            [sys.executable, "-c", code], env={"FD": str(file.fileno())}, keep=file.fileno(), tick=print
        )
    assert (result.returncode, result.stdout, result.stderr) == (3, "o\n", "e\n")


def test_last_lines_skip_blank_ones():
    assert last_lines("a\n\nb\n \nc\n", count=2) == "b\nc"
