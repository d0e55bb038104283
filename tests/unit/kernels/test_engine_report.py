"""Reports of engine processes: plain JSON text, never an exception, each tensor counted once."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from kernels.engine import report


class Tensor:
    """30 blocks of 3 heads, 32 tokens, K and V of size 64, two bytes each, unless told otherwise."""

    def __init__(self, place, *, shape=(30, 3, 32, 128), dtype="torch.bfloat16", width=2):
        self.place, self.shape, self.dtype, self.width = place, shape, dtype, width

    def numel(self):
        total = 1
        for size in self.shape:
            total *= size
        return total

    def element_size(self):
        return self.width

    def data_ptr(self):
        return self.place


class Backend:
    @staticmethod
    def get_name():
        return "CPU_ATTN"


class Impl:
    pass


def layer(tensor, *, cache_dtype="bfloat16"):
    return SimpleNamespace(attn_backend=Backend, impl=Impl(), kv_cache=tensor, kv_cache_dtype=cache_dtype)


def worker(layers, *, num_blocks=30):
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=32))
    return SimpleNamespace(
        rank=0,
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)),
        model_runner=SimpleNamespace(
            kv_cache_config=SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=[group])
        ),
    )


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """Stand-ins for torch and vLLM, which are no part of unit tests."""
    torch, vllm = ModuleType("torch"), ModuleType("vllm")
    torch.__version__, torch.version = "2.13.0+cpu", SimpleNamespace(cuda=None)
    torch.get_num_threads = lambda: 1
    vllm.__version__ = "0.32.0"
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "vllm", vllm)


def test_equal_layers_are_one_group():
    """Two layers of 30 x 3 x 32 x 128 x 2 bytes: 737,280 bytes each, 768 bytes for each of 960 tokens."""
    found = json.loads(report.worker_report(worker({"a": layer(Tensor(1)), "b": layer(Tensor(2))})))
    assert found["num_layers"] == 2
    assert found["kv_bytes_held"] == 2 * 737_280
    [group] = found["layers"]
    assert group["num_layers"] == 2
    assert group["names"] == ["a", "b"]
    assert group["backend"] == "CPU_ATTN"
    assert group["kv_bytes_per_token"] == 768.0
    assert group["kv_tensor_dtype"] == "bfloat16"
    assert group["impl_class"].endswith(".Impl")


def test_layers_that_differ_are_kept_apart():
    """A boundary layer that stayed bfloat16 beside a quantised one."""
    quantised = layer(Tensor(2, dtype="torch.uint8", width=1), cache_dtype="fp8")
    found = json.loads(report.worker_report(worker({"a": layer(Tensor(1)), "b": quantised})))
    assert [group["kv_bytes_per_token"] for group in found["layers"]] == [768.0, 384.0]


def test_a_shared_tensor_is_held_once():
    found = json.loads(report.worker_report(worker({"a": layer(Tensor(1)), "b": layer(Tensor(1))})))
    assert found["kv_bytes_held"] == 737_280


def test_layers_without_a_cache_are_not_counted():
    found = json.loads(report.worker_report(worker({"a": layer([Tensor(1)]), "moe": SimpleNamespace()})))
    assert found["num_layers"] == 1


def test_what_goes_wrong_is_text():
    """An exception inside an RPC would end the engine's output thread."""
    found = json.loads(report.worker_report(SimpleNamespace()))
    assert found["error"].startswith("AttributeError")
    assert found["pid"] > 0


def test_the_core_names_its_live_scheduler():
    class Queue:
        pass

    scheduler = SimpleNamespace(
        policy=SimpleNamespace(value="fcfs"), waiting=Queue(), kv_cache_config=SimpleNamespace(num_blocks=91)
    )
    found = json.loads(report.core_report(SimpleNamespace(scheduler=scheduler)))
    assert found["policy"] == "fcfs"
    assert found["queue_class"].endswith("Queue")
    assert found["num_blocks"] == 91
    assert (found["max_num_seqs"], found["max_num_batched_tokens"]) == (None, None)
