"""Facts of processes and of this host."""

import os

from workers import host


def test_a_process_tells_its_command_and_environment(tmp_path):
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"python\0-m\0vllm\0--x\0\0")
    (folder / "environ").write_bytes(
        b"VLLM_X=1\0CUDA_VISIBLE_DEVICES=\0HF_TOKEN=s\0VLLM_API_KEY=s\0HOME=/h\0A=b=c\0"
    )
    assert host.command_line(7, proc=tmp_path) == ["python", "-m", "vllm", "--x", ""]
    environment = host.process_environment(7, proc=tmp_path)
    assert environment["A"] == "b=c"
    assert host.shown(environment) == {"CUDA_VISIBLE_DEVICES": "", "VLLM_X": "1"}


def test_a_process_that_is_gone_is_none(tmp_path):
    assert host.command_line(7, proc=tmp_path) is None
    assert host.process_environment(7, proc=tmp_path) is None
    assert host.affinity(2**22 + 1) is None
    assert host.port_owned(1, pid=2**22 + 1) is None


def test_own_process():
    assert host.affinity(os.getpid()) == sorted(os.sched_getaffinity(0))
    assert host.command_line(os.getpid())


def test_python_of_a_virtual_environment(tmp_path):
    (tmp_path / "pyvenv.cfg").write_text("home = /usr\nversion_info = 3.11.7\n")
    assert host.venv_python(tmp_path) == "3.11.7"
    assert host.venv_python(tmp_path / "none") is None
    assert host.venv_python(None) is None


def test_processor_flags(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu AVX2 sse\nflags\t\t: other\n")
    assert host.cpu_flags(cpuinfo=info) == {"fpu", "avx2", "sse"}
    assert host.cpu_flags(cpuinfo=tmp_path / "none") == frozenset()


def test_this_host_is_described():
    facts = host.describe()
    assert facts["memory_bytes"] > 0
    assert facts["cores_logical"] >= 1
