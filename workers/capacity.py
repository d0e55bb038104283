"""How many bytes a token takes in the KV cache, by arithmetic alone.

Used twice: to turn a byte budget into blocks for engines that count blocks, and to check that the tokens a server
reports are those of the dtype that was asked for.
"""

from collections.abc import Mapping
from typing import Any

# Bytes per token, KV head and layer for K and V together, head size D: one function per stored layout.
# Scales of the *_per_token_head layouts are one float32 each for K and for V.
_WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
_FP8 = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2"})
_PER_TOKEN_HEAD = frozenset({"int8_per_token_head", "fp8_per_token_head"})


def bytes_per_token(model_config: Mapping[str, Any], *, kv_dtype: str, model_dtype: str) -> int | None:
    """Bytes of K and V for one token over all layers, or None if the layout is not known to this module.

    Layers * KV heads * head size * 2 * width for models whose layers all keep full attention over plain K and V.
    """
    shape = _plain_attention(model_config)
    if shape is None:
        return None
    layers, kv_heads, head_size = shape
    content = _content_bytes(kv_dtype, model_dtype=model_dtype, head_size=head_size)
    return None if content is None else layers * kv_heads * content


def num_blocks(
    model_config: Mapping[str, Any], *, memory_bytes: int, block_size: int, **dtypes: str
) -> int | None:
    """Whole blocks that fit into ``memory_bytes``, or None if bytes per token are not known."""
    per_token = bytes_per_token(model_config, **dtypes)
    return None if per_token is None else memory_bytes // (per_token * block_size)


def _content_bytes(kv_dtype: str, *, model_dtype: str, head_size: int) -> int | None:
    if kv_dtype == "auto":
        kv_dtype = model_dtype
    if kv_dtype in _WIDTHS:
        return 2 * head_size * _WIDTHS[kv_dtype]
    if kv_dtype in _FP8:
        return 2 * head_size
    if kv_dtype in _PER_TOKEN_HEAD:
        return 2 * (head_size + 4)
    return None


def _plain_attention(model_config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    if not model_config or model_config.get("kv_lora_rank") or _windowed(model_config):
        return None
    layers = model_config.get("num_hidden_layers")
    heads = model_config.get("num_attention_heads")
    hidden = model_config.get("hidden_size")
    if not layers or not heads or not hidden:
        return None
    kv_heads = model_config.get("num_key_value_heads") or heads
    return int(layers), int(kv_heads), int(model_config.get("head_dim") or hidden // heads)


def _windowed(model_config: Mapping[str, Any]) -> bool:
    layer_types = model_config.get("layer_types") or ()
    if any(kind != "full_attention" for kind in layer_types):
        return True
    return bool(model_config.get("sliding_window")) and model_config.get("use_sliding_window") is not False
