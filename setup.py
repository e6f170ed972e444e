"""Package metadata; the settings of build, lint and tests are in ``pyproject.toml``."""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
MPI = ["mpi4py>=4"]
DASK = ["distributed", "dask-jobqueue"]
# onnxscript is torch's exporter, which `convert --to onnx` is timed against.
ONNX = ["onnx>=1.17", "onnxruntime>=1.17", "onnxscript"]
DEV = [
    *MPI,
    *DASK,
    *ONNX,
    "codespell",
    "mypy>=2",
    "openmpi; platform_system == 'Linux'",
    "peft",
    "pytest>=9",
    "pytest-xdist",
    "ruff>=0.15",
    "sentence-transformers",
    "triton; platform_system == 'Linux'",
    "types-PyYAML",
]


class BuildWithConfigs(build_py):
    """Add the top-level ``configs/`` to the built package as ``megatron_deberta/configs``."""

    def _configs(self) -> dict[str, str]:
        """Return the source of each config by its path in the build directory."""
        package = Path(self.build_lib, "megatron_deberta")
        return {
            str(package / source.relative_to(ROOT)): str(source)
            for source in sorted(ROOT.glob("configs/*/*.yaml"))
        }

    def run(self) -> None:
        """Build the package, then copy the configs; an editable install reads the checkout's."""
        super().run()
        if not self.editable_mode:
            for target, source in self._configs().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """List the files that the build writes."""
        outputs: list[str] = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, *self._configs()]


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
    package_data={
        "megatron_deberta": ["py.typed"],
        "megatron_deberta.attention_maps": ["page.html"],
        "megatron_deberta.cluster": ["profiles/*.yaml"],
        "megatron_deberta.cluster.slurm": ["job.sbatch"],
        "megatron_deberta.ops.native": ["kernels.cpp", "vectors.h"],
        "megatron_deberta.report": ["page.*"],
    },
    cmdclass={"build_py": BuildWithConfigs},
    install_requires=[
        "torch>=2.6,<3",
        "argcomplete>=3.7,<4",
        # Private names of DeepSpeed are patched, so the minor version is fixed.
        "deepspeed>=0.19,<0.20",
        "numpy>=1.26",
        "omegaconf>=2.4",
        "safetensors",
        "sentencepiece",
        "tokenizers",
        "transformers>=5",
        "orjson",
        "packaging",
        "psutil",
        # Validates what is read; `extra` of `validate_json` is new in 2.12.
        "pydantic>=2.12,<3",
        "pyyaml",
        "rensa",
        "zstandard",
        "isal",
        "pyarrow",
        "gigatoken",
        "sentencex",
        "rich",
        "tensorboard",
        "jinja2",
        "matplotlib",
        "plotext>=5.3,<6",
        "protobuf",
        "scikit-learn",
        "scipy",
        "seqeval",
        "prometheus_client",
        "typing-extensions",
    ],
    extras_require={
        "mpi": MPI,
        "dask": DASK,
        "onnx": ONNX,
        "wandb": ["wandb>=0.19"],
        "dev": DEV,
        "all": [*MPI, *DASK, *ONNX],
    },
    entry_points={"console_scripts": ["megatron-deberta = megatron_deberta.cli.main:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
