#!/usr/bin/env python3
"""Write the attention operator as a folder for Hugging Face's `kernels` library.

The folder has the variants build/torch-cpu and build/torch-cuda, with the same code: the operator
with its Triton and CPU backends and use_fast_attention, which need torch and transformers alone.
`kernels` loads it from disk, or from the Hub after it was uploaded:

  python tools/build_kernel.py --output deberta_attention
  python -c "import kernels, pathlib; kernels.get_local_kernel(pathlib.Path('deberta_attention'))"
  hf upload USER/deberta-attention deberta_attention --repo-type kernel
"""

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

from megatron_deberta import __version__
from megatron_deberta.files import published_folder

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_deberta"
NAME = "deberta-attention"
BACKENDS = ("cpu", "cuda")
SOURCES = ("files.py", "hashing.py", "ops/**/*", "hf/fast_attention.py", "hf/packed_attention.py")
SUFFIXES = (".py", ".cpp", ".h")
IMPORT = re.compile(r"^(\s*)from megatron_deberta(?:\.([\w.]+))? import ", re.MULTILINE)
INIT = '''"""Disentangled attention of DeBERTa, from megatron_deberta {version}.

``use_fast_attention(model)`` lets the DeBERTa encoders of a transformers model compute attention
through ``disentangled_attention``, without padding.
"""

from .hf.fast_attention import FastAttentionHandle, use_fast_attention
from .ops import RelativePositions, disentangled_attention

__all__ = [
    "FastAttentionHandle", "RelativePositions", "disentangled_attention", "use_fast_attention",
]
'''
CARD = """---
library_name: kernels
license: apache-2.0
---

Disentangled attention of DeBERTa, -v2 and -v3: forward and backward without tensors of length x
length, with Triton on GPUs (compute capability 8.0 and newer) and native code on CPUs.

```python
from kernels import get_kernel

attention = get_kernel("USER/deberta-attention", version=1)
attention.use_fast_attention(model)      # a model of transformers with a DeBERTa encoder in it
```
"""


def relative_imports(text: str, folder: Path, namespace: str) -> str:
    """Return a module's code with imports relative to the root of the folder.

    Args:
        text: the module.
        folder: its folder, relative to the package.
        namespace: of the operators that it registers, which must differ from the package's.
    """
    dots = "." * (len(folder.parts) + 1)
    text = IMPORT.sub(lambda found: f"{found[1]}from {dots}{found[2] or ''} import ", text)
    return text.replace('"megatron_deberta::', f'"{namespace}::')


def build(output: Path) -> str:
    """Write the folder.

    Args:
        output: folder to create; an existing one must be empty.

    Returns:
        A digest of the sources, which ends the identifiers of the variants.
    """
    sources = sorted(
        path
        for pattern in SOURCES
        for path in PACKAGE.glob(pattern)
        if path.suffix in SUFFIXES and "__pycache__" not in path.parts
    )
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    with published_folder(output) as folder:
        for backend in BACKENDS:
            identifier = f"{NAME.replace('-', '_')}_{backend}_{digest}"
            _write_variant(folder / "build" / f"torch-{backend}", sources, identifier, backend)
        (folder / "README.md").write_text(CARD)
    return digest


def _write_variant(variant: Path, sources: list[Path], identifier: str, backend: str) -> None:
    metadata = {
        "id": identifier, "name": NAME, "version": 1, "license": "Apache-2.0",
        "python-depends": [], "backend": {"type": backend},
    }  # fmt: skip
    for path in sources:
        place = path.relative_to(PACKAGE)
        target = variant / place
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            text = relative_imports(text, place.parent, identifier)
        target.write_text(text, encoding="utf-8")
    (variant / "hf" / "__init__.py").write_text('"""transformers\' models."""\n')
    (variant / "__init__.py").write_text(INIT.format(version=__version__))
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def main() -> int:
    """Build the folder that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    args = parser.parse_args()
    if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
        print(f"build_kernel: error: {args.output} exists and is not empty", file=sys.stderr)
        return 2
    print(f"{args.output}: {build(args.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
