"""The limit of open files."""

import resource

from megatron_deberta.processes import raise_open_file_limit


def test_the_soft_limit_of_open_files_is_raised():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        raise_open_file_limit()
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536), hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
