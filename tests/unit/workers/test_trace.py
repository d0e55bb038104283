"""Trace files: times relative to the first row, and an error with file and line for every row that is not one."""

from pathlib import Path

import pytest

from conf.schema import Trace, TraceFormat
from workers.load.trace import TraceRow, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-17 00:00:00.0000001,879,55
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": []}
"""
PUBLIC_TRACE = Path(__file__).parents[4] / "shared/data/azure_llm_2023_conv.csv"


@pytest.fixture
def read(tmp_path):
    def read_text(text, kind, *, time_scale=1.0):
        path = tmp_path / "trace.txt"
        path.write_bytes(text.encode())
        return read_trace(Trace(path=str(path), format=TraceFormat(kind), time_scale=time_scale))

    return read_text


def row(offset_ns, num_input, num_output):
    return TraceRow(offset_ns=offset_ns, num_input_tokens=num_input, num_output_tokens=num_output)


def test_azure_times_keep_all_seven_decimals(read):
    """50.9951690 - 46.6805900 = 4.314579 s; from 18:15:46.68059 to midnight and 0.1 us are 20,653.3194101 s."""
    expected = [row(0, 374, 44), row(4_314_579_000, 396, 109), row(20_653_319_410_100, 879, 55)]
    assert read(AZURE, "azure") == expected


def test_azure_line_ends_byte_order_mark_and_column_order_do_not_matter(read):
    text = "\ufeffGeneratedTokens,Extra,TIMESTAMP,ContextTokens\r\n9,x,2024-05-10 00:00:01+00:00,8\r\n\r\n"
    assert read(text, "azure") == [row(0, 8, 9)]


def test_mooncake_times_are_milliseconds(read):
    """30,535 - 27,482 = 3,053 ms."""
    assert read(MOONCAKE, "mooncake") == [row(0, 6955, 52), row(3_053_000_000, 6472, 26)]


@pytest.mark.parametrize(("scale", "offset_ns"), [(2.0, 6_106_000_000), (0.5, 1_526_500_000)])
def test_time_scale_stretches_the_gaps(read, scale, offset_ns):
    assert read(MOONCAKE, "mooncake", time_scale=scale)[1].offset_ns == offset_ns


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("yesterday,1,2", "TIMESTAMP must look like .*, got 'yesterday'"),
        ("2023-13-16 18:15:46.1,1,2", "TIMESTAMP is no date and time"),
        ("2023-11-18 00:00:00,1", "expected 3 columns or more, got 2"),
        ("2023-11-18 00:00:00,1.5,2", "ContextTokens must be a whole number >= 1, got '1.5'"),
        ("2023-11-18 00:00:00,1,0", "GeneratedTokens must be a whole number >= 1, got '0'"),
        ("2023-11-18 00:00:00,1,", "GeneratedTokens must be a whole number >= 1, got ''"),
        ("2023-11-15 00:00:00,1,2", "before that of the row above; sort the trace"),
    ],
)
def test_malformed_azure_line_is_named(read, line, message):
    """The bad row is line 5 of the file."""
    with pytest.raises(ValueError, match=rf"trace\.txt:5: .*{message}"):
        read(AZURE + line + "\n", "azure")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 1,', "not a line of JSON"),
        ("[1, 2, 3]", "expected the keys timestamp, input_length, output_length, got"),
        ('{"timestamp": 1, "input_length": 2}', "expected the keys"),
        ('{"timestamp": -5, "input_length": 2, "output_length": 3}', "timestamp must be a number .*got -5"),
        ('{"timestamp": NaN, "input_length": 2, "output_length": 3}', "timestamp must be a number .*got nan"),
        ('{"timestamp": "9", "input_length": 2, "output_length": 3}', "timestamp must be a number .*got '9'"),
        ('{"timestamp": 40000, "input_length": 2.0, "output_length": 3}', "input_length must be .*got 2.0"),
        (
            '{"timestamp": 40000, "input_length": 2, "output_length": true}',
            "output_length must be .*got True",
        ),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}', "before that of the row above"),
    ],
)
def test_malformed_mooncake_line_is_named(read, line, message):
    """The bad row is line 4 of the file, after an empty line."""
    with pytest.raises(ValueError, match=rf"trace\.txt:4: .*{message}"):
        read(MOONCAKE + "\n" + line + "\n", "mooncake")


def test_a_file_of_the_other_format_is_refused_at_its_first_line(read):
    with pytest.raises(ValueError, match=r"trace\.txt:1: expected a header with TIMESTAMP"):
        read(MOONCAKE, "azure")
    with pytest.raises(ValueError, match=r"trace\.txt:1: not a line of JSON"):
        read(AZURE, "mooncake")


@pytest.mark.parametrize(("text", "kind"), [("", "mooncake"), (AZURE.splitlines()[0], "azure")])
def test_a_trace_without_requests_is_refused(read, text, kind):
    with pytest.raises(ValueError, match="the trace holds no requests"):
        read(text, kind)


def test_no_path_and_no_file_are_said():
    with pytest.raises(ValueError, match=r"load\.trace\.path must be set"):
        read_trace(Trace())
    with pytest.raises(ValueError, match=r"no such file: /nowhere/trace\.csv"):
        read_trace(Trace(path="/nowhere/trace.csv"))


def test_the_public_azure_trace_is_read_whole():
    """19,366 rows; first 374/44 at 0, last 197/183 at 19:14:08.402527 = 3,501.721937 s after 18:15:46.68059."""
    if not PUBLIC_TRACE.is_file():
        pytest.skip(f"needs the public Azure trace at {PUBLIC_TRACE}")
    rows = read_trace(Trace(path=str(PUBLIC_TRACE)))
    assert len(rows) == 19_366
    assert rows[0] == row(0, 374, 44)
    assert rows[-1] == row(3_501_721_937_000, 197, 183)
    assert sum(row.num_input_tokens for row in rows) == 22_361_870
    assert sum(row.num_output_tokens for row in rows) == 4_088_665
