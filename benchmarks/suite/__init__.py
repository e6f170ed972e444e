"""The parts of ``gpu_suite.py``: each a module with ``run(record)`` and ``table(items)``."""
