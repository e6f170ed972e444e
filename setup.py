"""Build of the package; its metadata and the settings of tools are in ``pyproject.toml``."""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
REPOSITORY = "https://github.com/megatron-deberta/megatron-deberta"


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


def read_description() -> str:
    """Return README.md with links to the repository, because relative ones fail on PyPI.

    GitHub shows a page at a picture's address below ``blob`` and the picture itself below ``raw``.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^\]]*\]\()(?![a-z]+:)", rf"\g<1>{REPOSITORY}/raw/main/", text)
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({REPOSITORY}/blob/main/", text)


setup(
    packages=find_packages(include=["megatron_deberta", "megatron_deberta.*"]),
    package_data={
        "megatron_deberta": ["py.typed"],
        "megatron_deberta.attention_maps": ["page.html"],
        "megatron_deberta.cluster": ["profiles/*.yaml"],
        "megatron_deberta.cluster.slurm": ["job.sbatch"],
        "megatron_deberta.ops.native": ["kernels.cpp", "vectors.h"],
        "megatron_deberta.report": ["page.*"],
    },
    long_description=read_description(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildWithConfigs},
)
