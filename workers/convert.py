"""Turn the GGUF file of a Python package into a folder in Hugging Face layout.

Run as a script by the engine environment's own interpreter, which has torch; it imports nothing of this project.
The conversion tools lie beside the package, in fixed versions, and come first on the import path.
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--packages", type=Path, required=True, help="folder with the unpacked packages")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.packages))
    convert(find_gguf(arguments.packages), output=arguments.output, dtype=arguments.dtype)
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

    folder = str(gguf.parent)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=gguf.name,
        dtype=getattr(torch, dtype),
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.save_pretrained(output)
    transformers.AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name).save_pretrained(output)


if __name__ == "__main__":
    sys.exit(main())
