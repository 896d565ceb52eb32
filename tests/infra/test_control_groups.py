"""The limits of control groups (infra/control_groups.py): cores and memory are within those of all groups around a
process, of both versions.

python -m pytest tests/infra/test_control_groups.py
"""

import math

import pytest

from infra.control_groups import core_limit, memory_limits

# Of each version of control groups: line of /proc/self/cgroup, folder, files of limit and use, line of memory.stat
GROUPS = {
    "v2": ("0::", "", "memory.max", "memory.current", "inactive_file"),
    "v1": ("7:cpu,memory:", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@pytest.mark.parametrize("version", GROUPS)
@pytest.mark.parametrize(
    ("of_job", "of_step", "limits"), [("9000", "max", [(9000, 5500)]), ("9000", "6000", [(6000, 2500), (9000, 5500)])]
)
def test_memory_is_within_the_limits_of_all_groups_around_a_process(tmp_path, version, of_job, of_step, limits):
    line, folder, limit, used, read_again = GROUPS[version]
    (tmp_path / "cgroup").write_text(f"9:pids:/job\n{line}/job/step\n")
    for group, of_group in (("job", of_job), ("job/step", of_step)):
        place = tmp_path / folder / group
        place.mkdir(parents=True, exist_ok=True)
        (place / limit).write_text(f"{of_group}\n")
        (place / used).write_text("4000\n")
        (place / "memory.stat").write_text(f"anon 3000\n{read_again} 500\n")
    assert list(memory_limits(tmp_path / "cgroup", tmp_path)) == limits
    assert list(memory_limits(tmp_path / "none", tmp_path)) == []


CORES = {
    "v2": ("0::", "", {"max": "max 100000", "2.5": "250000 100000", "0.5": "50000 100000"}),
    "v1": ("4:cpu,cpuacct:", "cpu", {"max": "-1", "2.5": "250000", "0.5": "50000"}),
}


@pytest.mark.parametrize("version", CORES)
@pytest.mark.parametrize(
    ("of_job", "of_step", "cores"),
    [("max", "max", math.inf), ("2.5", "max", 2), ("2.5", "0.5", 1), ("max", "2.5", 2)],
)
def test_cores_are_within_the_limits_of_all_groups_around_a_process(tmp_path, version, of_job, of_step, cores):
    line, folder, text_of = CORES[version]
    (tmp_path / "cgroup").write_text(f"9:pids:/job\n{line}/job/step\n")
    for group, of_group in (("job", of_job), ("job/step", of_step)):
        place = tmp_path / folder / group
        place.mkdir(parents=True, exist_ok=True)
        (place / ("cpu.max" if version == "v2" else "cpu.cfs_quota_us")).write_text(f"{text_of[of_group]}\n")
        (place / "cpu.cfs_period_us").write_text("100000\n")
    assert core_limit(tmp_path / "cgroup", tmp_path) == cores
    assert core_limit(tmp_path / "none", tmp_path) == math.inf
