"""A fake of the processes behind an engine environment: ``uv`` and the venv's own interpreter."""

import subprocess
from pathlib import Path


class FakeUv:
    """Acts on the file system as uv would; ``calls`` are the words before the first option of each call.

    ``fail`` maps such words to (exit code, standard error). ``lock`` is what resolving gives.
    """

    def __init__(self, *, lock="a==1\nb==2\n", check=("0.32.0\n", "", 0), fail=None):
        self.lock, self.check, self.fail = lock, check, fail or {}
        self.calls, self.argvs, self.envs = [], [], []

    def __call__(self, argv, *, env, keep, tick):
        argv = list(argv)
        words = " ".join(argv[1:]).split(" -")[0] if "uv" in Path(argv[0]).name else "check"
        self.calls.append(words)
        self.argvs.append(argv)
        self.envs.append(dict(env))
        if words in self.fail:
            code, stderr = self.fail[words]
            return subprocess.CompletedProcess(argv, code, "", stderr)
        stdout, stderr, code = self.act(words, argv)
        return subprocess.CompletedProcess(argv, code, stdout, stderr)

    def act(self, words, argv):
        if words == "pip compile":
            return self.lock, "", 0
        if words == "venv":
            python = Path(argv[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.write_text("")
        if words == "pip sync":
            packages = (
                Path(argv[argv.index("--python") + 1]).parents[1] / "lib" / "python3.11" / "site-packages"
            )
            for line in Path(argv[-1]).read_text().splitlines():
                (packages / f"{line.replace('==', '-')}.dist-info").mkdir(parents=True)
        if words == "pip freeze":
            return self.lock, "", 0
        return self.check if words == "check" else ("", "", 0)
