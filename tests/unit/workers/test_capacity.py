"""Bytes per token against what real servers reported."""

import pytest

from workers.capacity import bytes_per_token, num_blocks

SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_size": 576,
}


@pytest.mark.parametrize(
    ("kv_dtype", "expected"),
    [("auto", 23_040), ("bfloat16", 23_040), ("float32", 46_080), ("fp8", 11_520), ("fp8_e5m2", 11_520),
     ("int8_per_token_head", 12_240), ("turboquant_4bit_nc", None), ("new_dtype", None)],
)  # fmt: skip
def test_bytes_per_token(kv_dtype, expected):
    """30 layers * 3 heads * (2 * 64 * width), plus two 4-byte scales for per-token-head layouts."""
    assert bytes_per_token(SMOLLM2, kv_dtype=kv_dtype, model_dtype="bfloat16") == expected


@pytest.mark.parametrize(("kv_dtype", "tokens"), [("bfloat16", 2_912), ("fp8", 5_824)])
def test_blocks_are_those_a_real_server_reports(kv_dtype, tokens):
    """vLLM 0.31 and 0.32 with 64 MiB and blocks of 32."""
    blocks = num_blocks(
        SMOLLM2, memory_bytes=64 * 2**20, block_size=32, kv_dtype=kv_dtype, model_dtype="bfloat16"
    )
    assert blocks * 32 == tokens


@pytest.mark.parametrize(
    "change",
    [{"kv_lora_rank": 512}, {"sliding_window": 4096}, {"layer_types": ["sliding_attention", "full_attention"]},
     {"num_hidden_layers": None}],
)  # fmt: skip
def test_unknown_layouts_are_none(change):
    assert bytes_per_token(SMOLLM2 | change, kv_dtype="auto", model_dtype="bfloat16") is None


def test_a_window_that_is_switched_off_does_not_count():
    config = SMOLLM2 | {
        "sliding_window": 4096,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * 30,
    }
    assert bytes_per_token(config, kv_dtype="auto", model_dtype="bfloat16") == 23_040


def test_head_size_and_kv_heads_have_the_usual_defaults():
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    assert bytes_per_token(config, kv_dtype="auto", model_dtype="float32") == 2 * 4 * 2 * 8 * 4
