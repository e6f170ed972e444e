"""Metadata of the package; how to build, lint and test it is in ``pyproject.toml``."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """Take the version from the package without importing it."""
    text = (ROOT / "megatron_deberta" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if match is None:
        raise RuntimeError("megatron_deberta/__init__.py states no __version__")
    return match.group(1)


setup(
    name="megatron-deberta",
    version=read_version(),
    description="Pretraining of DeBERTa with tensor parallelism and DeepSpeed ZeRO",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megatron_deberta", "megatron_deberta.*"]),
    package_data={"megatron_deberta": ["py.typed"]},
    install_requires=[
        "torch>=2.6,<3",
        "deepspeed>=0.19",
        "numpy>=1.26",
        "omegaconf>=2.4",
        "safetensors",
        "sentencepiece",
        "tokenizers",
        "transformers>=5",
        "orjson",
        "packaging",
        "psutil",
        "zstandard",
        "isal",
        "pyarrow",
        "gigatoken",
        "sentencex",
        "rich",
        "tensorboard",
        "matplotlib",
        "protobuf",
    ],
    entry_points={"console_scripts": ["megatron-deberta = megatron_deberta.cli.main:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
