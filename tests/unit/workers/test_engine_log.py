"""Every wording that says which backend, configuration and capacity a server has."""

import pytest

from workers.engine_log import backend_of, compilations, parse_log

V1 = "INFO 11-30 22:08:18 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='/m', "


@pytest.mark.parametrize(
    ("line", "backend"),
    [
        ("Using Flash Attention backend on V1 engine.", "FLASH_ATTN"),
        ("Using Triton backend on V1 engine.", "TRITON_ATTN"),
        ("Using FlashInfer backend on V1 engine.", "FLASHINFER"),
        ("Using AttentionBackendEnum.TRITON_ATTN backend.", "TRITON_ATTN"),
        (
            "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER']",
            "FLASH_ATTN",
        ),
        (
            "Using AttentionBackendEnum.FLASHINFER attention backend out of potential backends: []",
            "FLASHINFER",
        ),
        ("Using TRITON_ATTN backend (selected via --attention-backend).", "TRITON_ATTN"),
        ("Using FlashAttention backend.", "FLASH_ATTN"),
        ("Using FlashAttention-2 backend.", "FLASH_ATTN"),
        ("Using XFormers backend.", "XFORMERS"),
        ("Using Torch SDPA backend.", "TORCH_SDPA"),
        ("Using CPU_MLA backend.", "CPU_MLA"),
        ("INFO 06-15 01:59:47 [cuda.py:482] Using Triton MLA backend on V1 engine.", "TRITON_MLA"),
        ("Cannot use Flash Attention backend for Turing GPUs.", None),
        ("Cannot use AttentionBackendEnum.FLASH_ATTN backend on CPU.", None),
        ("Using AttentionBackendEnum.FLASH_ATTN for MMEncoderAttention.", None),
        ("Using Flash Attention backend for ViT model.", None),
        ("Using TRITON Unquantized MoE backend out of potential backends: ['TRITON'].", None),
        ("Using LBHNC KV cache layout.", None),
        ("Using max model len 1024", None),
        ("Using Ray backend.", None),
    ],
)
def test_backend_wordings(line, backend):
    """C3, and lines that speak of something else."""
    assert backend_of(line) == backend


def test_refusal_followed_by_a_choice():
    log = parse_log(
        "Cannot use Flash Attention backend for Turing GPUs.\nUsing Triton backend on V1 engine.\n"
    )
    assert log.attention_backend == "TRITON_ATTN"


def test_target_and_draft_are_both_kept():
    """The explicit wording of the target, then the selected one of the draft (C3)."""
    log = parse_log(
        "Using AttentionBackendEnum.TRITON_ATTN backend.\n"
        "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER']\n"
    )
    assert log.backends == ("TRITON_ATTN", "FLASH_ATTN")
    assert (log.attention_backend, log.draft_attention_backend) == ("TRITON_ATTN", "FLASH_ATTN")


def test_two_backends_without_a_draft_model_are_two_backends_of_the_target():
    log = parse_log(
        f"{V1}speculative_config=None, dtype=torch.bfloat16\n"
        "Using AttentionBackendEnum.TURBOQUANT backend.\nUsing AttentionBackendEnum.FLASH_ATTN backend.\n"
    )
    assert log.backends == ("TURBOQUANT", "FLASH_ATTN")
    assert log.draft_attention_backend is None


def test_no_known_line_is_unknown():
    """Never the requested value (C3); a CPU server with CPU_ATTN asked for prints no line at all."""
    log = parse_log("non-default args: {'attention_backend': 'TRITON_ATTN'}\n")
    assert log.attention_backend is None
    assert log.arguments["attention_backend"] == "TRITON_ATTN"


def test_cpu_refuses_and_names_no_replacement():
    log = parse_log(f"{V1}device_config=cpu\nCannot use AttentionBackendEnum.FLASH_ATTN backend on CPU.\n")
    assert log.refused_backends == ("FLASH_ATTN",)
    assert log.attention_backend == "CPU_ATTN"


def test_older_cpu_builds_name_their_replacement():
    log = parse_log("Cannot use _Backend.FLASH_ATTN backend on CPU.\nUsing Torch SDPA backend.\n")
    assert log.refused_backends == ("FLASH_ATTN",)
    assert log.attention_backend == "TORCH_SDPA"


VLLM_0_32 = """\
(APIServer pid=1) INFO 11-30 22:07:31 [api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0
(APIServer pid=1) INFO 11-30 22:07:31 [api_utils.py:286] non-default args: {'model': '/m', 'dtype': 'bfloat16', \
'served_model_name': ['m'], 'kv_cache_memory_bytes': 67108864, 'scheduling_policy': 'priority'}
(EngineCore pid=2) INFO 11-30 22:08:18 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: \
model='/m, x', speculative_config=None, dtype=torch.bfloat16, max_seq_len=1024, tensor_parallel_size=1, \
pipeline_parallel_size=1, enforce_eager=True, kv_cache_dtype=auto, device_config=cpu, \
structured_outputs_config=StructuredOutputsConfig(backend='auto', dtype=no), seed=0, served_model_name=m, \
enable_prefix_caching=False, enable_chunked_prefill=True, compilation_config={'mode': 0, 'seed': 7}
(EngineCore pid=2) INFO 11-30 22:08:19 [ompmultiprocessing.py:185] OpenMP thread binding info:
(EngineCore pid=2) INFO 11-30 22:08:19 [ompmultiprocessing.py:185] \tlocal_rank=0, core ids=[0, 2]
(EngineCore pid=2) INFO 11-30 22:08:19 [ompmultiprocessing.py:185] \treserved_cpus=[1]
(EngineCore pid=2) INFO 11-30 22:08:45 [utils.py:347] Using LBHNC KV cache layout.
(EngineCore pid=2) INFO 11-30 22:08:45 [kv_cache_utils.py:2327] CPU KV cache size: 2,912 tokens, Maximum concurrency
"""


def test_a_whole_log_of_0_32():
    log = parse_log(VLLM_0_32)
    assert log.versions == ("0.32.0",)
    assert log.generation == "V1"
    assert log.config["model"] == "/m, x"
    assert log.config["dtype"] == "torch.bfloat16"
    assert log.config["enforce_eager"] == "True"
    assert log.config["enable_chunked_prefill"] == "True"
    assert log.config["seed"] == "0"
    assert log.arguments["scheduling_policy"] == "priority"
    assert log.cores == {0: (0, 2)}
    assert log.reserved_cores == (1,)
    assert log.kv_cache_tokens == 2912
    assert log.kv_cache_layout == "LBHNC"
    assert log.attention_backend is None


VLLM_0_4 = """\
INFO 04-25 10:00:00 api_server.py:151] vLLM API server version 0.4.1
INFO 04-25 10:00:00 api_server.py:152] args: Namespace(host=None, port=8000, model='facebook/opt-125m', block_size=16)
INFO 04-25 10:00:00 llm_engine.py:98] Initializing an LLM engine (v0.4.1) with config: model='facebook/opt-125m', \
speculative_config=None, dtype=torch.float16, max_seq_len=2048, load_format=auto, enforce_eager=False, \
kv_cache_dtype=auto, quantization_param_path=None, device_config=cuda, seed=0)
INFO 04-25 10:00:05 selector.py:28] Using FlashAttention backend.
INFO 04-25 10:00:09 gpu_executor.py:94] # GPU blocks: 36971, # CPU blocks: 7281
"""


def test_a_whole_log_of_0_4():
    log = parse_log(VLLM_0_4)
    assert log.versions == ("0.4.1",)
    assert log.generation is None
    assert log.config["kv_cache_dtype"] == "auto"
    assert log.arguments["block_size"] == "16"
    assert log.attention_backend == "FLASH_ATTN"
    assert log.kv_cache_blocks == 36971
    assert log.kv_cache_tokens is None


def test_a_log_of_0_8_on_v0():
    log = parse_log(
        "INFO 05-01 [llm_engine.py:240] Initializing a V0 LLM engine (v0.8.5) with config: model='m', "
        "kv_cache_dtype=auto, chunked_prefill_enabled=False\n"
        "INFO 05-01 [cpu.py:45] Using Torch SDPA backend.\n"
        "INFO 05-01 [executor_base.py:112] # cpu blocks: 7281, # CPU blocks: 0\n"
    )
    assert log.versions == ("0.8.5",)
    assert log.generation == "V0"
    assert log.attention_backend == "TORCH_SDPA"
    assert log.kv_cache_blocks == 7281


def test_arguments_that_are_not_literals_are_still_read():
    log = parse_log("non-default args: {'model': '/m', 'mode': <Mode.X: 1>, 'max_num_seqs': 64}\n")
    assert log.arguments["max_num_seqs"] == "64"


def test_an_empty_log_says_nothing():
    log = parse_log("")
    assert log.versions == ()
    assert log.attention_backend is None
    assert log.config == {}
    assert log.reserved_cores is None


JIT = (
    "(EngineCore pid=1) WARNING 05-16 11:10:19 [jit_monitor.py:103] Triton kernel JIT compilation during inference: "
    "_zero_kv_blocks_kernel. This causes a latency spike; consider extending warmup to cover this shape/config.\n"
)


def test_compilation_inside_a_text_is_found_once():
    """B6: a line saying that a kernel was JIT-compiled during inference."""
    assert len(compilations(JIT + JIT)) == 1
    assert "_zero_kv_blocks_kernel" in compilations(JIT)[0]


@pytest.mark.parametrize(
    "line",
    [
        "INFO [jit_monitor.py:73] Kernel JIT monitor activated; monitored JIT compilations during inference will use mode=warn.",
        "WARNING [vllm.py:1703] Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup.",
        'INFO: 127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK',
    ],
)  # fmt: skip
def test_lines_that_only_mention_compilation(line):
    assert compilations(line) == ()


@pytest.mark.parametrize(
    "line",
    [
        "Kernel _fwd was JIT-compiled during inference",
        "Triton autotuning for function _k, with key as (1,), finished after 1.20s, best config selected",
        "INFO [backends.py:215] Compiling a graph for dynamic shape takes 5.11 s",
        "CuTeDSL JIT compilation during inference: f",
    ],
)
def test_other_wordings_of_compilation(line):
    assert len(compilations(line)) == 1
