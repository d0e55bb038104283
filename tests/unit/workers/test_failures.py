"""Log text → class of a failed start."""

import pytest

from workers.failures import REMEDIES, classify_failure, failure_reason

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n'


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "ERROR:    the servelab plugin is not installed everywhere: Exception: Call to collective_rpc method failed",
            "plugin_failed",
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
            "does_not_fit",
        ),
        (
            (
                "ValueError: To serve at least one request with the model's max seq len (8192), (1.0 GiB KV cache is needed, "
                "which is larger than the available KV cache memory (0.25 GiB)."
            ),
            "does_not_fit",
        ),
        (
            (
                "ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be stored "
                "in KV cache (2048)."
            ),
            "does_not_fit",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB.", "does_not_fit"),
        (
            (
                "ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired GPU memory "
                "utilization (0.9, 19.84 GiB)."
            ),
            "device_busy",
        ),
        (
            (
                "ValueError: Available memory on node 0 (3.10/31.00 GiB) on startup is less than desired CPU memory "
                "utilization (0.92, 28.5 GiB)."
            ),
            "device_busy",
        ),
        ("OSError: [Errno 98] Address already in use", "port_taken"),
        ("torch.distributed.DistNetworkError: EADDRINUSE", "port_taken"),
        (TRACEBACK + "ModuleNotFoundError: No module named 'torchvision'", "environment_broken"),
        (
            "(EngineCore pid=7) ERROR 11-30 22:08:42 [core.py:1] ImportError: libcudart.so.12: cannot open",
            "environment_broken",
        ),
        ("/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by _C.so)", "environment_broken"),
        ("Segmentation fault", "died"),
        ("", "died"),
    ],
)
def test_the_log_names_the_class(text, cause):
    """Each known wording has its class; anything else is a plain death."""
    assert classify_failure(f"INFO start\n{text}\nINFO end", exit_code=1, timed_out=False) == cause


def test_a_reason_in_the_log_beats_the_clock():
    """A dead engine behind a living front end runs into the limit; the log still says why."""
    text = "(EngineCore pid=7) ValueError: No available memory for the cache blocks."
    assert classify_failure(text, exit_code=None, timed_out=True) == "does_not_fit"


def test_a_caught_import_error_is_no_reason_for_a_late_server():
    """Engines log import errors of optional parts; a slow start is not a broken environment."""
    text = "ImportError: flashinfer is not installed"
    assert classify_failure(text, exit_code=None, timed_out=True) == "start_timeout"


def test_a_warning_about_an_import_is_no_traceback():
    """Only a line that starts with the error class counts."""
    text = "WARNING [cpu.py:667] Failed to import from vllm._C: ImportError('x')"
    assert classify_failure(text, exit_code=1, timed_out=False) == "died"


def test_memory_beats_the_import_errors_before_it():
    """A specific reason wins over a general one that stands earlier in the log."""
    text = "ImportError: optional part\nValueError: No available memory for the cache blocks."
    assert classify_failure(text, exit_code=1, timed_out=False) == "does_not_fit"


def test_every_class_has_a_remedy():
    """A message always says what to do."""
    causes = {"does_not_fit", "device_busy", "start_timeout", "died", "port_taken", "environment_broken"}
    assert causes <= set(REMEDIES)


def test_the_reason_is_the_first_line_of_its_class():
    """Pages of consequences follow; the prefix of the process is cut off."""
    text = (
        "INFO start\n"
        "(EngineCore pid=7) ERROR 11-30 22:08:42 [core.py:1] ValueError: No available memory for the cache blocks. Try\n"
        "(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert (
        failure_reason(text, cause="does_not_fit")
        == "ValueError: No available memory for the cache blocks. Try"
    )
    assert failure_reason(text, cause="died").startswith("ValueError: No available")


def test_without_an_error_line_there_is_no_reason():
    """Nothing is made up."""
    assert failure_reason("INFO start\nKilled\n", cause="died") is None
    assert failure_reason("", cause="start_timeout") is None
