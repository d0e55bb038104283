"""Which sources a process runs: one hash, computed by the same code inside and outside the engine."""

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def source_files(package: Path) -> list[Path]:
    """Every Python file of a package, as paths relative to it, in one order."""
    found = (path.relative_to(package) for path in package.rglob("*.py"))
    return sorted(found, key=lambda path: path.as_posix())


def source_sha256(package: Path = PACKAGE) -> str:
    """SHA-256 over names and bytes of a package's Python files."""
    digest = hashlib.sha256()
    for path in source_files(package):
        content = (package / path).read_bytes()
        digest.update(f"{path.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


# Taken at import: what this process runs, whatever happens to the files later.
LOADED_SHA256 = source_sha256()
