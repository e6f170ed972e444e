"""Whether torch.compile works on this CPU."""

from __future__ import annotations

import os
import shutil

import pytest

COMPILER = os.environ.get("CXX", "g++")
needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"torch.compile needs the C++ compiler {COMPILER}"
)
