"""What this machine has: processor, cores a program may use, memory, NUMA nodes, GPUs. Read, never measured.

Everything comes from /proc, /sys, the scheduler and `nvidia-smi`; no library is loaded for it. `None` means not known.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGES = ("numpy", "safetensors", "torch", "transformers")
ISA_FLAGS = (
    "avx2",
    "fma",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Processors by number. `usable` is how many threads to take and `why` says how that came about; above `most`,
    threads wait for each other."""

    logical: int
    physical: int
    allowed: int
    quota: float | None
    most: int
    usable: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    index: int
    cpus: tuple[int, ...]
    memory_total: int | None


@dataclass(frozen=True, slots=True)
class CoreGroup:
    """Physical cores of one NUMA node that the process may run on; each is the numbers of its processors, ascending.

    `node` is None where the machine tells of no nodes.
    """

    node: int | None
    cores: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU; memory in bytes."""

    index: int
    name: str
    memory_total: int | None
    memory_free: int | None
    driver: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machine as read at one moment; memory in bytes."""

    cpu_name: str
    machine: str
    isa_flags: tuple[str, ...]
    cores: Cores
    numa_nodes: tuple[NumaNode, ...]
    memory_total: int | None
    memory_available: int | None
    memory_limit: int | None
    gpus: tuple[Gpu, ...]
    gpu_note: str
    huge_pages: str | None
    python: str
    packages: dict[str, str | None]


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The kernel's list format: "0-3,8" is 0, 1, 2, 3, 8."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if not part:
            continue
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def parse_cpu_quota(text: str) -> float | None:
    """cgroup v2 `cpu.max`, "quota period" in microseconds, as a number of processors; None for "max"."""
    quota, _, period = text.strip().partition(" ")
    if quota == "max" or not period:
        return None
    return int(quota) / int(period)


def usable_cores(root: Path = Path("/")) -> Cores:
    """How many threads can compute at full speed here.

    One a physical core among those the affinity mask allows, not more than the cgroup's processor quota; one is left
    to the rest of the program where that makes more than four.
    """
    cpus = root / "sys/devices/system/cpu"
    allowed = _allowed()
    siblings = {cpu: _first_sibling(cpus, cpu) for cpu in allowed}
    physical = len(set(siblings.values()))
    quota = _quota(root)
    threads, why = physical, f"{physical} physical cores allowed"
    if quota is not None and quota < threads:
        threads = max(1, int(quota))
        why = f"processor quota of {quota:g}"
    most = threads
    if threads > 4:
        threads -= 1
        why += ", one left to the rest of the program"
    online = _text(cpus / "online")
    logical = parse_cpu_list(online) if online else tuple(allowed)
    return Cores(
        logical=len(logical),
        physical=len({_first_sibling(cpus, cpu) for cpu in logical}),
        allowed=len(allowed),
        quota=quota,
        most=most,
        usable=threads,
        why=why,
    )


def oversubscribed(threads: int) -> str | None:
    """A warning for people where so many threads are more than the cores this process may use; None where not."""
    cores = usable_cores()
    if threads <= cores.most:
        return None
    return f"{threads} threads wait for each other on {cores.most} cores ({cores.why})"


def core_groups(root: Path = Path("/")) -> tuple[CoreGroup, ...]:
    """The cores this process may use, node by node; nodes without any are left out, as are those of memory alone."""
    cpus = root / "sys/devices/system/cpu"
    cores: dict[int, list[int]] = {}
    for cpu in _allowed():
        cores.setdefault(_first_sibling(cpus, cpu), []).append(cpu)
    left = {core[0]: tuple(core) for core in cores.values()}
    groups = []
    for node in _numa_nodes(root):
        mine = tuple(left.pop(cpu) for cpu in node.cpus if cpu in left)
        if mine:
            groups.append(CoreGroup(node.index, mine))
    if left:
        groups.append(CoreGroup(None, tuple(left.values())))
    return tuple(groups)


def detect(root: Path = Path("/")) -> Hardware:
    """Reads the machine; `root` is for tests of other machines' /proc and /sys."""
    memory = _meminfo(_text(root / "proc/meminfo"))
    cpuinfo = _text(root / "proc/cpuinfo") or ""
    flags = set((_field(cpuinfo, "flags") or "").split())
    gpus, gpu_note = detect_gpus(root)
    return Hardware(
        cpu_name=_field(cpuinfo, "model name") or platform.processor() or platform.machine(),
        machine=platform.machine(),
        isa_flags=tuple(flag for flag in ISA_FLAGS if flag in flags),
        cores=usable_cores(root),
        numa_nodes=tuple(_numa_nodes(root)),
        memory_total=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        memory_limit=_memory_limit(root),
        gpus=gpus,
        gpu_note=gpu_note,
        huge_pages=_chosen_word(_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
    )


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that a program can still have: what is free or can be freed, and what the cgroup allows. None: unknown."""
    free, limit = _meminfo(_text(root / "proc/meminfo")).get("MemAvailable"), _memory_limit(root)
    return min((amount for amount in (free, limit) if amount is not None), default=None)


def detect_gpus(root: Path = Path("/")) -> tuple[tuple[Gpu, ...], str]:
    """NVIDIA GPUs by `nvidia-smi`, or names alone from /proc, and a sentence on how they were looked for."""
    program = shutil.which("nvidia-smi")
    if program is not None:
        query = "--query-gpu=index,name,memory.total,memory.free,driver_version"
        try:
            done = subprocess.run(
                [program, query, "--format=csv,noheader,nounits"],
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return (), f"nvidia-smi did not answer: {error}"
        if done.returncode == 0:
            return parse_nvidia_smi(done.stdout), "read from nvidia-smi"
        reason = (done.stdout + done.stderr).strip().splitlines()
        return (), f"nvidia-smi failed: {reason[0] if reason else f'exit status {done.returncode}'}"
    folder = root / "proc/driver/nvidia/gpus"
    if folder.is_dir():
        names = [_field(_text(gpu / "information") or "", "Model") for gpu in sorted(folder.iterdir())]
        gpus = tuple(
            Gpu(index=i, name=name or "NVIDIA GPU", memory_total=None, memory_free=None, driver=None)
            for i, name in enumerate(names)
        )
        return gpus, "read from /proc/driver/nvidia; nvidia-smi is missing, so memory sizes are not known"
    return (), "no nvidia-smi and no NVIDIA driver"


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Lines of `index, name, MiB in all, MiB free, driver`."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 5 or not fields[0].isdigit():
            continue
        total, free = (int(f) << 20 if f.isdigit() else None for f in fields[2:4])
        gpus.append(
            Gpu(index=int(fields[0]), name=fields[1], memory_total=total, memory_free=free, driver=fields[4])
        )
    return tuple(gpus)


def _allowed() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _field(text: str, name: str) -> str | None:
    match = re.search(rf"^{re.escape(name)}\s*:\s*(.*)$", text, re.MULTILINE)
    return match.group(1).strip() if match else None


def _chosen_word(text: str | None) -> str | None:
    """The bracketed word of a /sys choice: "always [madvise] never" is madvise."""
    match = re.search(r"\[(\w+)\]", text or "")
    return match.group(1) if match else None


def _first_sibling(cpus: Path, cpu: int) -> int:
    """The lowest processor on the same physical core."""
    text = _text(cpus / f"cpu{cpu}/topology/thread_siblings_list")
    return min(parse_cpu_list(text)) if text and text.strip() else cpu


def _cgroup(root: Path) -> Path | None:
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            return root / "sys/fs/cgroup" / line[3:].lstrip("/")
    return None


def _cgroup_values(root: Path, name: str) -> Iterable[str]:
    """The setting in the process's own cgroup and every one above it; each of them limits."""
    folder, top = _cgroup(root), root / "sys/fs/cgroup"
    while folder is not None and folder.is_relative_to(top):
        text = _text(folder / name)
        if text is not None:
            yield text
        folder = folder.parent


def _quota(root: Path) -> float | None:
    quotas = [
        quota for text in _cgroup_values(root, "cpu.max") if (quota := parse_cpu_quota(text)) is not None
    ]
    return min([*quotas, *_quotas_v1(root)], default=None)


def _quotas_v1(root: Path) -> Iterable[float]:
    """Of the older cgroups, where each controller has its own tree: `cpu.cfs_quota_us` is -1 without a limit."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers
        folder = top / path.lstrip("/")
        while folder.is_relative_to(top):
            quota, period = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            if quota and period and int(quota) > 0:
                yield int(quota) / int(period)
            folder = folder.parent


def _memory_limit(root: Path) -> int | None:
    limits = [int(text) for text in _cgroup_values(root, "memory.max") if text.strip().isdigit()]
    return min(limits, default=None)


def _meminfo(text: str | None) -> dict[str, int]:
    pairs = re.findall(r"^(\w+):\s+(\d+) kB$", text or "", re.MULTILINE)
    return {name: int(kib) << 10 for name, kib in pairs}


def _numa_nodes(root: Path) -> Iterable[NumaNode]:
    folder = root / "sys/devices/system/node"
    for node in sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        memory = re.search(r"MemTotal:\s+(\d+) kB", _text(node / "meminfo") or "")
        yield NumaNode(
            index=int(node.name[4:]),
            cpus=parse_cpu_list(_text(node / "cpulist") or ""),
            memory_total=int(memory.group(1)) << 10 if memory else None,
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
