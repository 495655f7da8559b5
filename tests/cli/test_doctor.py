"""doctor: a verdict first, then what was found, and an exit code that can be trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ktplan.cli.doctor import Check, checks
from ktplan.hardware import Gpu, NumaNode, detect
from ktplan.kernels import Chosen, available_isas, bf16_words, isa

FAST = Chosen("avx512-vnni", "the best of this machine", (("amx-int8", "no amx_int8"),))


def line(found: list[Check], what: str) -> Check:
    return next(check for check in found if check.what == what)


def test_the_verdict_comes_first_and_names_the_kernels(cli: Callable[..., Any]) -> None:
    done = cli("doctor").ok()
    first = done.stdout.splitlines()[0]
    assert first.startswith("this machine can run int8 and int4 experts with ")


def test_the_report_for_machines_holds_every_check(cli: Callable[..., Any]) -> None:
    body = cli("doctor", "--json").ok().json()
    assert body["kind"] == "doctor-report"
    assert body["isa"]["chosen"] in available_isas() and body["isa"]["why"]
    assert {check["group"] for check in body["checks"]} == {"CPU", "memory", "GPU", "packages"}
    assert body["hardware"]["memory_total"] > 2**30


def test_a_lower_instruction_set_can_be_asked_for(cli: Callable[..., Any]) -> None:
    body = cli("doctor", "--json", env={"KTPLAN_ISA": "scalar"}).ok().json()
    assert body["isa"]["chosen"] == "scalar"
    assert "KTPLAN_ISA" in body["isa"]["why"]
    assert cli("doctor", "--strict", env={"KTPLAN_ISA": "scalar"}).code == 5


def test_an_instruction_set_that_does_not_exist_is_a_failure(cli: Callable[..., Any]) -> None:
    done = cli("doctor", env={"KTPLAN_ISA": "sse9"})
    assert done.code == 5 and "sse9" in done.stdout and "Traceback" not in done.stderr


def test_missing_kernels_fail_and_say_what_to_do() -> None:
    kernels = line(checks(detect(), None, "no module named ktplan._native"), "kernels")
    assert kernels.state == "fail" and "reinstall" in (kernels.remedy or "")


def test_rejected_instruction_sets_come_with_their_reason() -> None:
    assert line(checks(detect(), FAST, None), "not amx-int8").value == "no amx_int8"


def test_every_set_of_kernels_is_shown_with_what_it_is_to_this_machine() -> None:
    """The one in use, those that could be asked for, those that cannot run and why; and what multiplies bfloat16."""
    chosen = isa()
    found = checks(detect(), chosen, None)
    assert line(found, "kernels").value.startswith(f"{chosen.value}: ")
    assert line(found, "bfloat16 experts").value == bf16_words(chosen.value)
    lower = line(found, "lower kernels").value if chosen.value != "scalar" else ""
    for name in ("amx-int8", "avx512-vnni", "avx-vnni", "avx512", "avx2", "scalar"):
        rejected = any(check.what == f"not {name}" and check.value for check in found)
        listed = name in lower.partition(" (")[0].split(", ")
        assert [name == chosen.value, rejected, listed].count(True) == 1, name


def test_several_numa_nodes_suggest_parts() -> None:
    nodes = tuple(NumaNode(index=n, cpus=(n,), memory_total=2**34) for n in range(2))
    found = line(checks(replace(detect(), numa_nodes=nodes), FAST, None), "NUMA nodes")
    assert found.state == "note" and "--numa-parts 2" in (found.remedy or "")


@pytest.mark.parametrize(("package", "state"), [("torch", "note"), ("numpy", "fail")])
def test_a_missing_package_is_a_note_or_a_failure_by_what_needs_it(package: str, state: str) -> None:
    machine = detect()
    machine = replace(machine, packages={**machine.packages, package: None})
    found = line(checks(machine, FAST, None), package)
    assert found.state == state and "pip install" in (found.remedy or "")


def test_a_gpu_is_listed_with_its_memory() -> None:
    gpu = Gpu(
        index=0, name="NVIDIA GeForce RTX 4090", memory_total=24 << 30, memory_free=23 << 30, driver="560.35"
    )
    found = line(checks(replace(detect(), gpus=(gpu,)), FAST, None), "GPU 0")
    assert found.value == "NVIDIA GeForce RTX 4090, 24.0 GiB, 23.0 GiB free"


def test_tiles_are_detected_permitted_emulated_and_forced(cli: Callable[..., Any]) -> None:
    from ktplan import kernels

    state = kernels.tile_state()
    report = cli("doctor", "--json").ok().json()
    assert report["tiles"] == state._asdict()
    if state.permitted or not {"avx512_vnni", "avx512bw"} <= set(kernels.cpu_features()):
        pytest.skip("needs AVX-512 VNNI and no AMX")
    forced = {"KTPLAN_ISA": "amx-int8"}
    emulated = cli("doctor", env={**forced, "KTPLAN_AMX_EMULATED": "1"}).ok().stdout
    assert (
        "not detected, emulated by a trap handler, forced by KTPLAN_ISA: the processor has no amx" in emulated
    )
    assert "amx-int8: KTPLAN_ISA asks for it; emulated" in emulated
    refused = cli("doctor", env=forced)
    assert (
        refused.code == 5
        and "'amx-int8' cannot run on this machine: the processor has no amx" in refused.stdout
    )
