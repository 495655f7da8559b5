"""Groups of threads, where they run, what they take, and what they leave alone."""

from __future__ import annotations

import ctypes
import inspect
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ktplan import kernels
from ktplan.errors import BadUsage
from ktplan.hardware import CoreGroup
from ktplan.kernels import ExpertLayer, PackedExpert, Place, Pool, places

CPUS = sorted(os.sched_getaffinity(0))
TWO_NODES = (CoreGroup(0, ((0, 16), (1, 17), (2, 18))), CoreGroup(1, ((8, 24), (9, 25), (10, 26))))
HERE_TWICE = (
    CoreGroup(None, ((CPUS[0],), (CPUS[-1],))),
) * 2  # two groups of threads on this machine's real cores


def parts_of(parts: int, experts: int = 6, inner: int = 128) -> list[list[PackedExpert]]:
    random, hidden = np.random.default_rng(5), 256

    def expert() -> PackedExpert:
        arrays = []
        for rows, columns in ((inner, hidden), (inner, hidden), (hidden, inner)):
            arrays += [
                random.integers(0, 256, rows * columns, np.uint8),
                np.full(rows, 0.01 / np.sqrt(columns), np.float32),
            ]
        return PackedExpert(*arrays)

    return [[expert() for _ in range(experts)] for _ in range(parts)]


def layer(parts: list[list[PackedExpert]], pool: Pool, **how: object) -> ExpertLayer:
    inner = len(parts[0][0].gate_scale) * len(parts)
    sizes = {"hidden": 256, "intermediate": inner, "bits": 8}
    return ExpertLayer(parts, **sizes, threads_pool=pool, **how)  # type: ignore[arg-type]


def routed(tokens: int, choices: int = 3, experts: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(9)
    x = random.standard_normal((tokens, 256), np.float32)
    ids = np.argsort(random.random((tokens, experts)), axis=1)[:, :choices].astype(np.int64)
    return x, ids, random.random((tokens, choices), np.float32)


class TestPlaces:
    def test_threads_are_spread_over_the_nodes_as_their_cores_are(self) -> None:
        lopsided = (CoreGroup(0, ((0,), (1,), (2,), (3,))), CoreGroup(1, ((4,), (5,))))
        found = places(lopsided, 3, "node")
        assert [p.group for p in found] == [0, 0, 1]
        assert found[0] == Place(0, (0, 1, 2, 3), 0) and found[2] == Place(1, (4, 5), 1)

    def test_a_core_of_its_own_is_both_its_hyperthreads(self) -> None:
        found = places(TWO_NODES, 4, "core")
        assert [p.cpus for p in found] == [(0, 16), (1, 17), (8, 24), (9, 25)]
        assert [p.node for p in found] == [0, 0, 1, 1]

    def test_more_threads_than_cores_own_none(self) -> None:
        found = places(TWO_NODES, 7, "core")
        assert len(found) == 7
        assert {p.cpus for p in found} == {(0, 1, 2, 16, 17, 18), (8, 9, 10, 24, 25, 26)}

    def test_nothing_is_pinned_when_so_asked(self) -> None:
        assert {p.cpus for p in places(TWO_NODES, 4, "none")} == {()}

    def test_memory_of_a_single_node_needs_no_preference(self) -> None:
        assert places(TWO_NODES[:1], 2, "node")[0].node is None

    def test_a_machine_that_tells_nothing_has_one_group(self) -> None:
        assert places((), 2, "node") == [Place(0), Place(0)]

    def test_so_many_nodes_that_they_count_as_one(self) -> None:
        many = [CoreGroup(n, ((n,),)) for n in range(kernels.MAX_GROUPS + 1)]
        assert {(p.group, p.node) for p in places(many, 20, "node")} == {(0, None)}


def test_threads_run_where_they_were_placed_and_the_caller_where_it_likes() -> None:
    before = os.sched_getaffinity(0)
    pool = Pool(4, groups=[CoreGroup(None, ((CPUS[0],), (CPUS[-1],))), CoreGroup(None, ((CPUS[-1],),))])
    layer(parts_of(2), pool).forward(*routed(20))
    assert [p.group for p in pool.places] == [0, 0, 0, 1]
    both = sorted({CPUS[0], CPUS[-1]})
    assert pool.affinity == [[], both, both, [CPUS[-1]]]
    assert os.sched_getaffinity(0) == before
    assert pool.troubles == []


def test_threads_that_are_left_alone_may_run_anywhere() -> None:
    pool = Pool(2, pin="none")
    layer(parts_of(1), pool).forward(*routed(20))
    assert pool.affinity[1] == CPUS


def test_a_worker_makes_room_for_the_caller() -> None:
    """The caller starts on the core that a worker owns: the two change places."""
    if len(CPUS) < 2:
        pytest.skip("needs two processors")
    pool = Pool(2, pin="core", groups=[CoreGroup(None, ((CPUS[0],), (CPUS[1],)))])
    one = layer(parts_of(1), pool)
    seen = []

    def call() -> None:
        for cpu in (CPUS[1], CPUS[0]):
            os.sched_setaffinity(0, {cpu})  # of this thread alone
            one.forward(*routed(40))
            seen.append((cpu, pool.affinity[1]))

    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
    assert seen == [(CPUS[1], [CPUS[0]]), (CPUS[0], [CPUS[1]])]


def test_a_processor_that_does_not_exist_is_told_and_not_fatal() -> None:
    pool = Pool(2, groups=[CoreGroup(None, ((1000,), (1001,)))], pin="core")
    call = routed(30)
    np.testing.assert_array_equal(
        layer(parts_of(1), pool).forward(*call), layer(parts_of(1), Pool(1)).forward(*call)
    )
    assert len(pool.troubles) == 1 and "could not be pinned" in pool.troubles[0]


def test_a_node_that_does_not_exist_is_told_and_not_fatal() -> None:
    apart = [CoreGroup(900 + g, ((CPUS[0],), (CPUS[-1],))) for g in range(2)]
    pool = Pool(4, groups=apart)
    call = routed(30)
    one = layer(parts_of(2), pool, memory="moved")
    np.testing.assert_array_equal(one.forward(*call), layer(parts_of(2), Pool(1)).forward(*call))
    assert one.trouble is not None and "moved" in one.trouble
    for _ in range(500):  # a worker says so itself, when it gets to run; the caller may be done before
        if any("memory" in trouble for trouble in pool.troubles):
            return
        time.sleep(0.01)
    pytest.fail(f"no word of memory in {pool.troubles}")


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("threads", [2, 3, 4, 7])
def test_groups_share_the_work_and_change_no_bit(parts: int, threads: int) -> None:
    made = parts_of(parts)
    pool = Pool(threads, groups=HERE_TWICE)
    for tokens in (1, 5, 70):
        call = routed(tokens)
        np.testing.assert_array_equal(
            layer(made, pool).forward(*call), layer(made, Pool(1)).forward(*call), err_msg=str(tokens)
        )
    assert {p.group for p in pool.places} == {0, 1}
    assert sum(own + stolen for own, stolen in pool.taken) > 0


def test_idle_groups_take_the_others_work() -> None:
    """All tokens go to experts of one group: without stealing, the caller's group would have nothing to do."""
    made = parts_of(1, experts=4)
    pool = Pool(2, groups=HERE_TWICE)
    assert [p.group for p in pool.places] == [0, 1]
    one = layer(made, pool)
    x, _, weights = routed(60, choices=2)
    odd = np.tile(np.array([[1, 3]]), (60, 1))  # both are at home in group 1
    np.testing.assert_array_equal(one.forward(x, odd, weights), layer(made, Pool(1)).forward(x, odd, weights))
    stolen = 0
    for _ in range(200):  # the other thread may be faster once, not always
        one.forward(x, odd, weights)
        stolen = pool.taken[0][1]
        if stolen:
            break
    assert stolen > 0


@pytest.mark.parametrize("memory", ["mapped", "moved", "copied"])
@pytest.mark.parametrize("groups", [1, 2])
def test_where_the_weights_lie_changes_no_bit(memory: str, groups: int) -> None:
    made = parts_of(2)
    call = routed(9)
    expected = layer(made, Pool(1)).forward(*call)
    one = layer(made, Pool(2, groups=HERE_TWICE[:groups]), memory=memory)
    np.testing.assert_array_equal(one.forward(*call), expected)
    held = 2 * 6 * 3 * 256 * 128
    assert one.read() == held
    if memory == "copied":
        assert held <= one.copied_bytes < held + groups * (4 << 20)
        for part in made:
            for expert in part:
                expert.gate[:] = 0
        np.testing.assert_array_equal(one.forward(*call), expected)
    else:
        assert one.copied_bytes == 0


def test_a_layer_tells_on_which_nodes_its_weights_lie() -> None:
    one = layer(parts_of(1), Pool(1))
    one.read()
    found = one.nodes()
    if found:  # some containers do not tell
        assert sum(found.values()) >= 6 * 3 * 256 * 128 // 4096
        assert max(found, key=lambda node: found[node]) >= 0


@pytest.mark.parametrize("how", [{"pin": "socket"}, {"threads": 0}, {"threads": 1025}])
def test_pools_that_cannot_be_are_refused(how: dict[str, object]) -> None:
    with pytest.raises(BadUsage):
        Pool(**how)  # type: ignore[arg-type]


def test_memory_that_is_not_known_is_refused() -> None:
    with pytest.raises(BadUsage, match="'disk'"):
        layer(parts_of(1), Pool(1), memory="disk")


def test_the_environment_says_how_to_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTPLAN_PIN", "none")
    assert Pool(2).pin == "none"
    assert Pool(2, pin="core").pin == "core"
    monkeypatch.setenv("KTPLAN_PIN", "everywhere")
    with pytest.raises(BadUsage, match="everywhere"):
        Pool(2)


def test_two_models_at_once_do_not_meet() -> None:
    """Each has its own threads and memory; another thread may run the other at the same time."""
    made = [parts_of(1), parts_of(2, inner=64)]
    layers = [layer(parts, Pool(2)) for parts in made]
    calls = [routed(tokens) for tokens in (3, 40)]
    expected = [[one.forward(*call) for call in calls] for one in layers]
    wrong: list[str] = []

    def run(number: int) -> None:
        for turn in range(60):
            which = turn % 2
            if not np.array_equal(layers[number].forward(*calls[which]), expected[number][which]):
                wrong.append(f"layer {number}, call {turn}")

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def mxcsr() -> int:
    """The floating-point control and status of this thread, with the status taken off."""
    state = ctypes.create_string_buffer(32)
    ctypes.CDLL("libm.so.6").fegetenv(state)
    return int.from_bytes(state.raw[28:32], "little") & ~0x3F


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="another processor's control word")
def test_neither_importing_nor_working_changes_the_control_word() -> None:
    show = """
import ctypes, threading
{mxcsr}
seen = [mxcsr()]
import numpy as np
from ktplan.kernels import ExpertLayer, PackedExpert, Pool
seen.append(mxcsr())
b, s = np.ones(64 * 64, np.uint8), np.ones(64, np.float32)
layer = ExpertLayer([[PackedExpert(b, s, b, s, b, s)]], hidden=64, intermediate=64, bits=8, threads_pool=Pool(2))
call = np.ones((9, 64), np.float32), np.zeros((9, 1), np.int64), np.ones((9, 1), np.float32)
layer.forward(*call); seen.append(mxcsr())
layer.submit(*call).result(); seen.append(mxcsr())
later = threading.Thread(target=lambda: seen.append(mxcsr())); later.start(); later.join()
print(*seen)
"""
    code = show.format(mxcsr=inspect.getsource(mxcsr))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(0x1F80)] * 5, done.stderr
