"""Port blocks and leases."""

import contextlib
import socket

import pytest

from workers import ports
from workers.errors import EngineStartError
from workers.ports import BLOCK, block_starts, lease_ports


def test_blocks_lie_below_the_usual_ephemeral_range():
    """With 32768-60999 the first block starts at 10240, the last one below ends at 32767, and some lie above."""
    starts = block_starts((32768, 60999))
    assert starts[0] == 10240
    assert 32736 in starts  # 32736 .. 32767
    assert 32768 not in starts
    assert not [start for start in starts if start + BLOCK > 32768 and start <= 60999]
    assert starts[-1] + BLOCK - 1 <= 65535


def test_a_wide_ephemeral_range_leaves_what_is_above_it():
    """1024-65000: only whole blocks from 65001 up."""
    starts = block_starts((1024, 65000))
    assert min(starts) > 65000
    assert len(starts) == 16  # 65024, 65056, ... 65504


def test_two_leases_share_no_port(tmp_path):
    """A held lease is skipped by the next one, a released one is used again."""
    with lease_ports(folder=tmp_path) as first:
        with lease_ports(folder=tmp_path) as second:
            assert second.port >= first.port + BLOCK
            assert first.internal_port == first.port + 1
        held = second.port
        with lease_ports(folder=tmp_path) as third:
            assert third.port == held


def test_a_port_in_use_is_not_leased(tmp_path):
    """A listener that knows nothing of leases makes its block unusable."""
    with lease_ports(folder=tmp_path) as free:
        pass
    with contextlib.closing(socket.socket()) as other:
        other.bind(("127.0.0.1", free.port))
        other.listen()
        with lease_ports(folder=tmp_path) as lease:
            assert lease.port > free.port


def test_a_port_that_has_just_failed_is_avoided(tmp_path):
    """The retry does not pick the same port again, even if it looks free."""
    with lease_ports(folder=tmp_path) as first:
        pass
    with lease_ports(folder=tmp_path, avoid={first.port}) as second:
        assert second.port != first.port


def test_no_block_left_is_one_clear_error(tmp_path, monkeypatch):
    """The message names the range and the folder of the leases."""
    monkeypatch.setattr(ports, "ephemeral_range", lambda: (1024, 65535))
    with (
        pytest.raises(EngineStartError, match=r"no free block of 32 ports .*\(1024, 65535\)") as caught,
        lease_ports(folder=tmp_path),
    ):
        pass
    assert caught.value.cause == "port_taken"
