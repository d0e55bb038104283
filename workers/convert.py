"""Turn the GGUF file of a Python package into a folder in Hugging Face layout.

Run as a script by the engine environment's own interpreter, which has torch and transformers; it imports nothing
of this project. The written bytes depend on the weights and the dtype, not on who converts: lines that only name
the converting version are taken out.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# Keys that change with the converting program and mean nothing to an engine.
VOLATILE_KEYS = ("transformers_version", "is_local", "local_files_only")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--packages", type=Path, required=True, help="folder with the unpacked packages")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.packages))
    convert(find_gguf(arguments.packages), output=arguments.output, dtype=arguments.dtype)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        drop_volatile_keys(arguments.output / name)
    return 0


def find_gguf(packages: Path) -> Path:
    """The one GGUF file below ``packages``. Ends the process when there is none or a choice."""
    files = sorted(packages.rglob("*.gguf"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        sys.exit(f"expected one .gguf file in the package, found: {names}")
    return files[0]


def convert(gguf: Path, *, output: Path, dtype: str) -> None:
    """Write weights of ``dtype`` as safetensors and the tokenizer, with its chat template, to ``output``."""
    import torch
    import transformers

    is_old = int(transformers.__version__.split(".")[0]) < 5
    options: dict[str, Any] = {"torch_dtype" if is_old else "dtype": getattr(torch, dtype)}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    folder = str(gguf.parent)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, **options)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(output, safe_serialization=True) if is_old else model.save_pretrained(output)
    transformers.AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name).save_pretrained(output)


def drop_volatile_keys(path: Path) -> None:
    """Take ``VOLATILE_KEYS`` out of a JSON file that may be absent."""
    if not path.exists():
        return
    values = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in values.items() if key not in VOLATILE_KEYS}
    path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
