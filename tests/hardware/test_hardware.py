"""What a machine has, from the text of other machines' /proc, /sys and nvidia-smi."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ktplan.hardware import (
    CoreGroup,
    core_groups,
    detect,
    oversubscribed,
    parse_cpu_list,
    parse_cpu_quota,
    parse_nvidia_smi,
    usable_cores,
)


def machine(root: Path, cpus: int, threads_per_core: int = 1, cgroup: dict[str, str] | None = None) -> Path:
    """A /proc and /sys with so many processors; siblings are numbered as Linux does, half a machine apart."""
    cores = cpus // threads_per_core
    folder = root / "sys/devices/system/cpu"
    for cpu in range(cpus):
        siblings = ",".join(str(cpu % cores + cores * t) for t in range(threads_per_core))
        topology = folder / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    (folder / "online").write_text(f"0-{cpus - 1}\n")
    (root / "proc/self").mkdir(parents=True)
    if cgroup is not None:
        (root / "proc/self/cgroup").write_text("0::/user.slice/job\n")
        for name, text in cgroup.items():
            path = root / "sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return root


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("0-1,8,10-11\n", (0, 1, 8, 10, 11)), ("\n", ())],
)
def test_the_kernels_list_of_processors(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize(("text", "quota"), [("max 100000\n", None), ("250000 100000", 2.5), ("max", None)])
def test_a_processor_quota(text: str, quota: float | None) -> None:
    assert parse_cpu_quota(text) == quota


@pytest.mark.usefixtures("affinity")
class TestCores:
    def test_hyperthreads_count_once_and_one_core_is_left(self, tmp_path: Path) -> None:
        cores = usable_cores(machine(tmp_path, 16, threads_per_core=2))
        assert (cores.logical, cores.physical, cores.allowed, cores.usable) == (16, 8, 16, 7)
        assert cores.why == "8 physical cores allowed, one left to the rest of the program"

    def test_few_cores_are_all_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 8})
        cores = usable_cores(machine(tmp_path, 16, threads_per_core=2))
        assert (cores.allowed, cores.usable) == (3, 2)  # 0 and 8 share a core

    def test_the_quota_of_an_outer_cgroup_limits_too(self, tmp_path: Path) -> None:
        limits = {"user.slice/job/cpu.max": "max 100000", "user.slice/cpu.max": "350000 100000"}
        cores = usable_cores(machine(tmp_path, 16, cgroup=limits))
        assert cores.quota == 3.5 and cores.usable == 3
        assert "3.5" in cores.why

    def test_the_older_cgroups_limit_too(self, tmp_path: Path) -> None:
        root = machine(tmp_path, 16)
        (root / "proc/self/cgroup").write_text("5:memory:/box\n4:cpu,cpuacct:/box/job\n0::/\n")
        for folder, quota in (("box/job", "-1"), ("box", "600000")):
            path = root / "sys/fs/cgroup/cpu,cpuacct" / folder
            path.mkdir(parents=True, exist_ok=True)
            (path / "cpu.cfs_quota_us").write_text(quota + "\n")
            (path / "cpu.cfs_period_us").write_text("100000\n")
        cores = usable_cores(root)
        assert (cores.quota, cores.most, cores.usable) == (6.0, 6, 5)

    def test_less_than_a_processor_is_still_a_thread(self, tmp_path: Path) -> None:
        cores = usable_cores(machine(tmp_path, 16, cgroup={"cpu.max": "50000 100000"}))
        assert cores.usable == 1


def test_too_many_threads_are_worth_a_warning() -> None:
    assert oversubscribed(1) is None
    most = usable_cores().most
    assert oversubscribed(most) is None
    warning = oversubscribed(most + 1)
    assert warning is not None and warning.startswith(
        f"{most + 1} threads wait for each other on {most} cores"
    )


@pytest.mark.usefixtures("affinity")
class TestCoreGroups:
    def nodes(self, root: Path, *lists: str) -> Path:
        for node, cpus in enumerate(lists):
            folder = root / f"sys/devices/system/node/node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(cpus + "\n")
        return root

    def test_cores_go_by_node_with_their_hyperthreads(self, tmp_path: Path) -> None:
        root = self.nodes(machine(tmp_path, 16, threads_per_core=2), "0-3,8-11", "4-7,12-15")
        first, second = core_groups(root)
        assert first == CoreGroup(0, ((0, 8), (1, 9), (2, 10), (3, 11)))
        assert second == CoreGroup(1, ((4, 12), (5, 13), (6, 14), (7, 15)))

    def test_only_what_the_process_may_use_counts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 8, 9})
        root = self.nodes(machine(tmp_path, 16, threads_per_core=2), "0-3,8-11", "4-7,12-15")
        assert core_groups(root) == (CoreGroup(0, ((1, 9), (8,))),)

    def test_nodes_of_memory_alone_have_no_group(self, tmp_path: Path) -> None:
        root = self.nodes(machine(tmp_path, 16), "0-7", "8-15", "")
        assert [group.node for group in core_groups(root)] == [0, 1]

    def test_a_machine_that_tells_of_no_nodes_is_one_group(self, tmp_path: Path) -> None:
        (only,) = core_groups(machine(tmp_path, 16, threads_per_core=2))
        assert only.node is None and len(only.cores) == 8


def test_a_dual_socket_server(tmp_path: Path) -> None:
    root = machine(
        tmp_path, 4, cgroup={"user.slice/job/memory.max": "max", "user.slice/memory.max": str(2**34)}
    )
    (root / "proc/meminfo").write_text(
        "MemTotal:       65536 kB\nMemFree: 100 kB\nMemAvailable:   32768 kB\n"
    )
    (root / "proc/cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) 6454S\nflags\t\t: fpu avx2 fma avx512_vnni amx_int8 cx8\n"
    )
    for node in range(2):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{2 * node}-{2 * node + 1}\n")
        (folder / "meminfo").write_text(f"Node {node} MemTotal:       32768 kB\n")
    pages = root / "sys/kernel/mm/transparent_hugepage"
    pages.mkdir(parents=True)
    (pages / "enabled").write_text("always [madvise] never\n")
    found = detect(root)
    assert found.cpu_name == "Intel(R) Xeon(R) 6454S"
    assert found.isa_flags == ("avx2", "fma", "avx512_vnni", "amx_int8")
    assert (found.memory_total, found.memory_available, found.memory_limit) == (2**26, 2**25, 2**34)
    assert [(n.index, n.cpus, n.memory_total) for n in found.numa_nodes] == [
        (0, (0, 1), 2**25),
        (1, (2, 3), 2**25),
    ]
    assert found.huge_pages == "madvise"


def test_what_is_not_there_is_not_known(tmp_path: Path) -> None:
    found = detect(tmp_path)
    assert found.memory_total is None and found.memory_limit is None
    assert found.numa_nodes == () and found.isa_flags == () and found.cpu_name


class TestGpus:
    def test_memory_comes_in_bytes(self) -> None:
        text = "0, NVIDIA GeForce RTX 4090, 24564, 23100, 560.35.03\n1, NVIDIA H200, 143771, [N/A], 560.35.03\nnoise\n"
        first, second = parse_nvidia_smi(text)
        assert (first.name, first.memory_total, first.memory_free) == (
            "NVIDIA GeForce RTX 4090",
            24564 << 20,
            23100 << 20,
        )
        assert second.index == 1 and second.memory_free is None and second.driver == "560.35.03"

    def program(self, folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
        path = folder / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def test_nvidia_smi_is_asked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program(tmp_path, "echo '0, NVIDIA L4, 23034, 22000, 550.54'", monkeypatch)
        found = detect(tmp_path)
        assert [gpu.name for gpu in found.gpus] == ["NVIDIA L4"] and "nvidia-smi" in found.gpu_note

    def test_a_broken_driver_is_told_in_its_own_words(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
        self.program(tmp_path, f'echo "{said}"; exit 9', monkeypatch)
        found = detect(tmp_path)
        assert found.gpus == () and said in found.gpu_note

    def test_a_driver_without_its_program_still_names_the_gpu(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        folder = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA GeForce RTX 3060\nIRQ: 77\n")
        found = detect(tmp_path)
        assert [(gpu.name, gpu.memory_total) for gpu in found.gpus] == [("NVIDIA GeForce RTX 3060", None)]


def test_this_machine_is_read_without_torch() -> None:
    found = detect()
    assert found.cores.usable >= 1 and found.cores.allowed >= found.cores.usable
    assert found.memory_total and found.memory_total >= (found.memory_available or 0)
    assert set(found.packages) == {"numpy", "safetensors", "torch", "transformers"}
