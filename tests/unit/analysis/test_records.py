"""Rows of requests and their Parquet file."""

from dataclasses import fields, replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.records import SCHEMA, Record, read_records, write_records

FULL = Record(
    index=7,
    phase="measured",
    due_ns=1,
    queued_ns=2,
    sent_ns=3,
    first_token_ns=4,
    first_answer_ns=5,
    last_token_ns=9_007_199_254_740_993,  # not a float64
    done_ns=9_007_199_254_740_995,
    token_ns=(4, 5, 9_007_199_254_740_993),
    num_prompt_tokens_requested=10,
    num_prompt_tokens=11,
    num_output_tokens_requested=12,
    num_output_tokens=3,
    num_output_tokens_source="server",
    num_output_tokens_client=3,
    finish_reason="length",
    http_status=200,
    text="é 漢字\n",
)
EMPTY = Record(index=8, phase="warmup", due_ns=0)
FAILED = replace(EMPTY, index=9, error="no token")


def test_rows_come_back_as_they_were(tmp_path):
    path = tmp_path / "records.parquet"
    write_records(path, [FULL, EMPTY, FAILED])
    assert read_records(path) == [FULL, EMPTY, FAILED]


def test_no_rows_are_a_file_too(tmp_path):
    path = tmp_path / "records.parquet"
    write_records(path, iter(()))
    assert read_records(path) == []


def test_a_missing_stamp_is_null_in_the_file(tmp_path):
    """``None`` is stored as null, never as 0."""
    path = tmp_path / "records.parquet"
    write_records(path, [EMPTY])
    assert pq.read_table(path).column("sent_ns").to_pylist() == [None]


def test_columns_of_a_newer_version_are_ignored(tmp_path):
    path = tmp_path / "records.parquet"
    write_records(path, [FULL])
    table = pq.read_table(path)
    pq.write_table(table.append_column("colour", pa.array(["red"])), path)
    assert read_records(path) == [FULL]


def test_the_file_has_every_field_of_a_record():
    assert SCHEMA.names == [field.name for field in fields(Record)]


@pytest.mark.parametrize(("row", "is_failed"), [(FULL, False), (FAILED, True)])
def test_an_error_makes_a_request_failed(row, is_failed):
    assert row.failed is is_failed
