"""What a version string may be taken for."""

import pytest

from workers.versions import commit_of, same_commit, same_release


@pytest.mark.parametrize(
    ("version", "commit"),
    [
        ("0.1.dev7557+g977180c", "977180c"),
        ("0.21.1rc1.dev46+gb50646e5e", "b50646e5e"),
        ("0.6.4.post2.dev395+g02222a02.d20241217", "02222a02"),
        ("0.1.dev1+cu128.gdeadbee", "deadbee"),
        ("0.32.0", None),
        ("0.32.0+gpu1", None),
        (None, None),
    ],
)
def test_commit_of_a_version(version, commit):
    assert commit_of(version) == commit


def test_commits_compare_by_their_common_length():
    assert same_commit("977180c", "977180c1234567")
    assert not same_commit("977180c", "deadbee")


@pytest.mark.parametrize(
    ("reported", "same"),
    [
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.32", True),
        ("0.32.1", False),
        ("0.32.0rc1", False),
        ("0.32.0+gdeadbee", False),
        ("0.1.dev7557+g977180c", False),
        ("unknown", False),
    ],
)
def test_release_asked_for(reported, same):
    """A checkout that carries a release's number is not that release (C4)."""
    assert same_release("0.32.0", reported) is same
