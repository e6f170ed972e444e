"""Ranks from each launcher's variables; errors for inconsistent variables."""

from __future__ import annotations

import re

import pytest

from megatron_deberta.distributed.environment import RankEnvironment, first_host, read_environment
from megatron_deberta.errors import EXIT_USAGE, TopologyError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1", "MASTER_PORT": "29500",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "17", "SLURM_NTASKS": "20", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "991",
    "SLURM_JOB_NODELIST": "login,dgx[007-009]", "SLURM_STEP_NODELIST": "dgx[007-008,12]",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}  # fmt: skip
HYDRA = {
    "PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "n0", "MASTER_PORT": "4000",
}  # fmt: skip


def _ranks(environment: RankEnvironment) -> tuple[str, int, int, int, int]:
    return (
        environment.launcher,
        environment.rank,
        environment.world_size,
        environment.local_rank,
        environment.local_world_size,
    )


def test_torchrun() -> None:
    environment = read_environment(TORCHRUN)
    assert _ranks(environment) == ("torchrun", 5, 8, 1, 4)
    assert (environment.master_address, environment.master_port) == ("n1", 29500)


def test_srun() -> None:
    environment = read_environment(SRUN)
    assert _ranks(environment) == ("srun", 17, 20, 1, 4)
    assert environment.master_address == "dgx007"
    assert 12000 <= environment.master_port < 32000
    assert read_environment({**SRUN, "SLURM_PROCID": "0"}).master_port == environment.master_port
    assert read_environment({**SRUN, "SLURM_STEP_ID": "1"}).master_port != environment.master_port


def test_meeting_point_can_be_set() -> None:
    environment = read_environment({**SRUN, "MASTER_ADDR": "ib0", "MASTER_PORT": "1234"})
    assert (environment.master_address, environment.master_port) == ("ib0", 1234)


@pytest.mark.parametrize("variables", [TORCHRUN, SRUN, OPEN_MPI, HYDRA])
@pytest.mark.parametrize("port", ["0", "-1", "65536", "99999", "abc", "1e4", "12.0", "²"])
def test_what_is_no_port_is_a_mistake_of_the_user(variables: dict[str, str], port: str) -> None:
    given = {**variables, "MASTER_ADDR": "n0", "MASTER_PORT": port}
    said = f"MASTER_PORT='{re.escape(port)}' is not a port from 1 to 65535; set it to a free one"
    with pytest.raises(TopologyError, match=said) as caught:
        read_environment(given)
    assert caught.value.exit_code == EXIT_USAGE
    assert read_environment({**given, "MASTER_PORT": " 65535 "}).master_port == 65535


def test_open_mpi_on_one_node() -> None:
    environment = read_environment(OPEN_MPI)
    assert _ranks(environment) == ("mpirun", 3, 4, 3, 4)
    assert environment.master_address == "127.0.0.1"
    other = read_environment({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"})
    assert other.master_port == environment.master_port


def test_hydra() -> None:
    environment = read_environment(HYDRA)
    assert _ranks(environment) == ("mpirun", 1, 4, 1, 2)
    assert (environment.master_address, environment.master_port) == ("n0", 4000)


def test_nothing_is_one_process() -> None:
    assert _ranks(read_environment({"PATH": "/bin"})) == ("none", 0, 1, 0, 1)


BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "7"}
"""Variables of a batch script that was submitted without ``--ntasks``."""


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"SLURM_TASKS_PER_NODE": "32"},
        {"SLURM_TASKS_PER_NODE": "16(x2)", "SLURM_NTASKS": "", "SLURM_STEP_ID": ""},
        {"SLURM_LOCALID": "", "SLURM_NODEID": ""},
        {"SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "32"},
        {"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "1"},
    ],
)
def test_batch_script_without_tasks_is_one_process(more: dict[str, str]) -> None:
    assert _ranks(read_environment({**BATCH, **more}))[1:] == (0, 1, 0, 1)


def test_interactive_shell_of_several_tasks_needs_srun() -> None:
    variables = {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4"}
    with pytest.raises(TopologyError, match="put srun before"):
        read_environment(variables)


@pytest.mark.parametrize("variables", [TORCHRUN, SRUN, OPEN_MPI, HYDRA])
def test_empty_variables_are_not_given(variables: dict[str, str]) -> None:
    assert _ranks(read_environment(dict.fromkeys(variables, ""))) == ("none", 0, 1, 0, 1)
    others = {**TORCHRUN, **SRUN, **OPEN_MPI, **HYDRA}
    empty = {name: "" for name in others if name not in variables}
    assert read_environment({**empty, **variables}) == read_environment(variables)


def test_empty_layout_of_slurm_is_not_given() -> None:
    layout = {"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_TASKS_PER_NODE": ""}
    environment = read_environment({**SRUN, **layout, "SLURM_NTASKS": "18", "MASTER_ADDR": ""})
    assert (environment.local_world_size, environment.master_address) == (18, "dgx007")


@pytest.mark.parametrize("inner", [TORCHRUN, OPEN_MPI, HYDRA])
def test_innermost_launcher_counts(inner: dict[str, str]) -> None:
    assert read_environment({**SRUN, **inner}) == read_environment(inner)


def test_srun_with_pmi_is_srun() -> None:
    assert read_environment({**SRUN, "PMI_RANK": "17", "PMI_SIZE": "20"}).launcher == "srun"


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("gpu7", "gpu7"),
        ("gpu[003-006,9],login1", "gpu003"),
        ("a,b", "a"),
        ("rack[2,5]-n[01-16]", "rack2-n01"),
        ("n[1,3].site.org", "n1.site.org"),
    ],
)
def test_first_host(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"LOCAL_RANK": "0"}, "RANK is not set"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of 8"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not a number"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "of 9 in a job of 8"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, "without MASTER_ADDR"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}, "put srun before"),
        ({**SRUN, "SLURM_STEP_NODELIST": "[", "SLURM_JOB_NODELIST": "["}, "names no host"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4x2"}, "'4x2' does not have the form"),
        ({**SRUN, "SLURM_NODEID": "3"}, "SLURM_NODEID=3 is beyond the 3 nodes"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "rank 4 of 4"),
    ],
)
def test_contradictions_are_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        read_environment(variables)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
