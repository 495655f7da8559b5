"""The trap emulator and the probe, compiled once a session; the trap is installed for the tests that ask for it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
_REQUEST_PERMISSION, _TILE_DATA, _ARCH_PRCTL = 0x1023, 18, 158


@dataclass(frozen=True)
class Trap:
    """The emulator, installed. `native`: what this processor executes itself, so that nothing is trapped or counted."""

    library: ctypes.CDLL
    path: Path
    native: frozenset[str]

    def count(self, instruction: str) -> int:
        found: int = self.library.amx_trap_count(instruction.encode())
        assert found >= 0, instruction
        return found

    def reset(self) -> None:
        self.library.amx_trap_reset()


def _compile(source: str, folder: Path, *options: str) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    out = folder / f"lib{Path(source).stem}.so"
    command = [compiler, "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", *options]
    subprocess.run([*command, "-o", str(out), str(HERE / source), "-ldl"], check=True)
    return out


@pytest.fixture(scope="session")
def trap_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _compile("amx_trap.cc", tmp_path_factory.mktemp("trap"), "-O3")


@pytest.fixture(scope="session")
def probe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _compile("probe.cc", tmp_path_factory.mktemp("probe"), "-O2", "-mavx2")


@pytest.fixture(scope="session")
def probe(probe_path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(probe_path))


@pytest.fixture(scope="session")
def _trap_library(trap_path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(trap_path), mode=ctypes.RTLD_GLOBAL)
    library.amx_trap_count.restype = ctypes.c_int64
    return library


@pytest.fixture
def trap(_trap_library: ctypes.CDLL, trap_path: Path) -> Iterator[Trap]:
    """SIGILL goes to the emulator during the test, and back to pytest's faulthandler afterwards."""
    native = _native_features()
    assert _trap_library.amx_trap_install() == 0
    _trap_library.amx_trap_reset()
    yield Trap(_trap_library, trap_path, native)
    assert _trap_library.amx_trap_remove() == 0


def _native_features() -> frozenset[str]:
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    found = {"amx": "amx_tile", "avx-vnni": "avx_vnni"}
    native = frozenset(name for name, flag in found.items() if flag in flags)
    if "amx" in native:
        ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return native
