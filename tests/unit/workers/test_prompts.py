"""Prompts: unique in a run, fixed by the stream, and of whatever file format shows in the content."""

import json
from pathlib import Path

import numpy as np
import pytest

from workers.load.prompts import file_prompts, random_prompts, read_prompts, written_prompts, written_texts

DATA = Path(__file__).parents[4] / "shared/data"


def stream(*entropy):
    return np.random.SeedSequence(list(entropy) or [0])


@pytest.fixture
def write(tmp_path):
    def write_file(content, *, name="prompts.json"):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        return path

    return write_file


class TestRandom:
    def test_ids_are_ordinary_and_lengths_exact(self):
        prompts = random_prompts([1, 50, 500], stream=stream(), vocab_size=20)
        assert [len(prompt.token_ids) for prompt in prompts] == [1, 50, 500]
        assert [prompt.num_tokens for prompt in prompts] == [1, 50, 500]
        assert set(prompts[2].token_ids) == set(range(3, 20))
        assert all(prompt.text is None for prompt in prompts)

    def test_same_stream_same_prompts_and_another_stream_others(self):
        first, again, other = (
            random_prompts([8] * 5, stream=stream(*entropy), vocab_size=1_000)
            for entropy in ((1, 0), (1, 0), (1, 1))
        )
        assert first == again
        assert not set(first) & set(other)

    def test_a_prompt_depends_on_its_place_alone(self):
        """Other lengths before it, and more prompts after it, leave prompt 2 as it is."""
        short = random_prompts([4, 4, 9], stream=stream(), vocab_size=1_000)
        long = random_prompts([70, 3, 9, 9], stream=stream(), vocab_size=1_000)
        assert short[2] == long[2]

    def test_prompts_are_unique_even_where_few_are_possible(self):
        """Four ids make 16 prompts of two tokens; 12 different ones are found."""
        prompts = random_prompts([2] * 12, stream=stream(), vocab_size=7)
        assert len(set(prompts)) == 12

    def test_used_up_prompts_are_an_error_that_names_the_length(self):
        with pytest.raises(
            ValueError, match=r"no unused prompt of 1 tokens .*vocab_size=5.*use longer prompts"
        ):
            random_prompts([1] * 3, stream=stream(), vocab_size=5)

    def test_prompts_to_avoid_are_avoided(self):
        used = [(3,), (4,), (5,)]
        assert random_prompts([1], stream=stream(), vocab_size=7, avoid=used)[0].token_ids == (6,)

    def test_shared_prefix_is_inside_the_length(self):
        first, second = random_prompts([10, 12], stream=stream(), vocab_size=1_000, shared_prefix_tokens=8)
        assert first.token_ids[:8] == second.token_ids[:8]
        assert first.token_ids[8:] != second.token_ids[8:10]
        assert (len(first.token_ids), len(second.token_ids)) == (10, 12)

    def test_prefix_must_leave_room(self):
        with pytest.raises(ValueError, match="must be < every prompt length, got 8 and a prompt of 8 tokens"):
            random_prompts([9, 8], stream=stream(), vocab_size=100, shared_prefix_tokens=8)

    @pytest.mark.parametrize("vocab_size", [None, 3])
    def test_vocabulary_must_be_known(self, vocab_size):
        with pytest.raises(ValueError, match=f"got vocab_size={vocab_size}"):
            random_prompts([1], stream=stream(), vocab_size=vocab_size)


class TestWritten:
    def test_there_are_many_questions_of_many_lengths(self):
        questions = written_texts("questions.txt")
        assert len(set(questions)) == len(questions) >= 60
        assert min(map(len, questions)) < 50
        assert max(map(len, questions)) > 800
        assert all(questions)

    def test_prompts_differ_from_their_first_word(self):
        prompts = written_prompts(500, stream=stream())
        assert len({prompt.text.split(":")[0] for prompt in prompts}) == 500
        assert {prompt.num_tokens for prompt in prompts} == {None}

    def test_questions_are_used_equally_often(self):
        count = len(written_texts("questions.txt"))
        used = [prompt.text.split("\n\n", 1)[1] for prompt in written_prompts(2 * count, stream=stream())]
        assert len(set(used[:count])) == len(set(used[count:])) == count

    def test_more_requests_begin_with_the_same_prompts(self):
        assert written_prompts(300, stream=stream(3))[:40] == written_prompts(40, stream=stream(3))

    def test_repeats_get_other_prompts(self):
        first, second = (written_prompts(50, stream=stream(0, repeat)) for repeat in (0, 1))
        assert not set(first) & set(second)


SHAREGPT = [
    {
        "id": "a",
        "conversations": [{"from": "human", "value": " Hi there "}, {"from": "gpt", "value": "Hello"}],
    },
    {
        "id": "b",
        "conversations": [{"from": "gpt", "value": "Go on"}, {"from": "user", "value": "Next\u2028line"}],
    },
    {"id": "c", "conversations": []},
]
LMSYS = [
    {
        "conversation_id": "x",
        "conversation": [{"role": "user", "content": "One"}, {"role": "assistant", "content": "1"}],
    },
    {
        "conversation_id": "y",
        "conversation": [{"role": "system", "content": "S"}, {"role": "user", "content": "Two"}],
    },
]
MT_BENCH = [{"question_id": 81, "category": "writing", "turns": ["Compose", "Rewrite"]}]
INSTRUCTIONS = [
    {"instruction": "Shorten.", "instances": [{"input": "A long text", "output": "A text"}]},
    {"instruction": "Name a tree.", "instances": [{"input": "", "output": "Oak"}]},
]
FORMATS = [
    (SHAREGPT, ["Hi there", "Next\u2028line"]),
    (LMSYS, ["One", "Two"]),
    (MT_BENCH, ["Compose"]),
    (INSTRUCTIONS, ["Shorten.\n\nA long text", "Name a tree."]),
]


class TestFile:
    @pytest.mark.parametrize(("rows", "texts"), FORMATS)
    def test_kind_is_seen_in_the_content_of_an_array(self, write, rows, texts):
        assert read_prompts(write(json.dumps(rows, indent=1), name="any.txt")) == texts

    @pytest.mark.parametrize(("rows", "texts"), FORMATS)
    def test_kind_is_seen_in_the_content_of_json_lines(self, write, rows, texts):
        """Line separators inside of a text do not end a row."""
        lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        assert read_prompts(write(lines + "\n\n")) == texts

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ('{"prompt": "Hi", "answer": 3}', r"prompts.json:1: .*got the keys 'prompt', 'answer'"),
            ('[{"turns": ["a"]}, ["b"]]', r"prompts.json: row 1: .*got a list"),
            ('{"turns": ["a"]}\nHi\n', r"prompts.json:2: not JSON"),
            ("[{]", r"prompts.json: not JSON"),
            ('{"turns": []}', r"prompts.json:1: 'turns' is not built as expected: \[\]"),
            (
                '{"conversations": [{"value": "a"}]}',
                r"prompts.json:1: 'conversations' is not built as expected",
            ),
            ('{"conversations": []}', r"no row holds a prompt \(1 rows\)"),
            ("", r"no row holds a prompt \(0 rows\)"),
        ],
    )
    def test_what_is_no_prompt_file_is_refused_with_place_and_content(self, write, content, message):
        with pytest.raises(ValueError, match=message):
            read_prompts(write(content))

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(ValueError, match=r"workload.path: no such file: .*gone\.json"):
            read_prompts(tmp_path / "gone.json")

    def test_texts_are_asked_unchanged_once_and_marked_when_they_come_again(self, write):
        """Five requests from two texts: each once as it is, each once as variant 2, one as variant 3."""
        path = write(json.dumps([{"turns": ["A"]}, {"turns": ["B"]}, {"turns": ["A"]}]))
        texts = [prompt.text for prompt in file_prompts(path, count=5, stream=stream())]
        assert sorted(texts[:2]) == ["A", "B"]
        assert sorted(texts[2:4]) == ["Variant 2.\nA", "Variant 2.\nB"]
        assert texts[4] in {"Variant 3.\nA", "Variant 3.\nB"}

    @pytest.mark.parametrize(
        ("name", "count", "first"),
        [
            ("mt_bench_questions.jsonl", 80, "Compose an engaging travel blog post"),
            ("self_instruct_user_oriented.jsonl", 252, "The sentence you are given might be too wordy"),
        ],
    )
    def test_public_files_are_read_whole(self, name, count, first):
        path = DATA / name
        if not path.is_file():
            pytest.skip(f"needs the public file {path}")
        prompts = read_prompts(path)
        assert len(prompts) == count
        assert prompts[0].startswith(first)
