"""The experts of a layer, run by native code: which instruction set, how many threads, and the forward pass.

The only importer of the compiled module. Arrays are used where they lie (numpy, or anything with `__dlpack__` on the
CPU, such as torch tensors without gradient), read-only ones included; the caller keeps mapped files in place.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ktplan import _native
from ktplan.errors import BadInput, BadUsage, MachineLacks
from ktplan.hardware import CoreGroup, core_groups, usable_cores

T = TypeVar("T")
F32 = npt.NDArray[np.float32]
Scales = F32 | npt.NDArray[np.uint16]
Numerics = Literal["ktplan", "upstream"]
Pin = Literal["core", "node", "none"]
Memory = Literal["mapped", "moved", "copied"]

ISA_VARIABLE = "KTPLAN_ISA"
PIN_VARIABLE = "KTPLAN_PIN"
MAX_GROUPS = 16
SPIN_US = 100  # how long an idle thread waits awake: longer than the gap between two phases, far below a millisecond


@dataclass(frozen=True, slots=True)
class Chosen(Generic[T]):
    """A choice with its reason; `rejected` holds what would have been better, and why it is not."""

    value: T
    why: str
    rejected: tuple[tuple[str, str], ...] = field(default=())


def isa(wanted: str | None = None) -> Chosen[str]:
    """The instruction set that kernels use: the best that runs here, or the lower one asked for.

    `wanted` defaults to the environment's KTPLAN_ISA. A name that this build does not have, or one that the machine
    cannot run, raises MachineLacks.
    """
    tables = _native.tables()
    asked, source = wanted, "asked for"
    if asked is None and os.environ.get(ISA_VARIABLE):
        asked, source = os.environ[ISA_VARIABLE], f"{ISA_VARIABLE} asks for it"
    runnable = [table[0] for table in tables if not table[2]]
    trapped = {table[0] for table in tables if table[4]}
    own = [name for name in runnable if name not in trapped]
    rejected = [(name, missing) for name, _, missing, _, _ in tables if missing]
    rejected += [
        (name, "only emulated, by a trap handler: never taken unasked")
        for name in runnable
        if name in trapped
    ]
    if asked is None:
        why = "the best in this build" if not rejected else "the best that this machine runs"
        return Chosen(own[0], why, tuple(rejected))
    known = {name: missing for name, _, missing, _, _ in tables}
    if asked not in known:
        raise MachineLacks(
            f"instruction set {asked!r} is not in this build ({source})",
            hint=f"use one of: {', '.join(runnable)}",
        )
    if known[asked]:
        raise MachineLacks(
            f"instruction set {asked!r} cannot run on this machine: {known[asked]} ({source})",
            hint=f"use one of: {', '.join(runnable)}",
        )
    if asked in trapped:
        source += "; emulated by a trap handler, for tests"
    better = [(name, f"{asked} was asked for") for name in runnable[: runnable.index(asked)] if name in own]
    return Chosen(asked, source, tuple([(name, why) for name, why in rejected if name != asked] + better))


def available_isas() -> list[str]:
    """Names of the instruction sets that run here, best first; the last is always "scalar". None that is emulated."""
    return [name for name, _, missing, _, emulated in _native.tables() if not missing and not emulated]


def isa_words(name: str) -> str:
    """The name as people write it: "AVX-512 VNNI"."""
    return next(words for known, words, *_ in _native.tables() if known == name)


def bf16_words(name: str) -> str:
    """What multiplies bfloat16 weights under that instruction set: "AVX-512 BF16"."""
    return next(words for known, _, _, words, _ in _native.tables() if known == name)


class TileState(NamedTuple):
    """Tiles (AMX): whether the machine has them, whether the operating system lets this process use them, whether a
    trap handler of the tests executes them; and what is missing, in words."""

    detected: bool
    permitted: bool
    emulated: bool
    missing: str


def tile_state() -> TileState:
    """Asks the operating system for permission, once for the process, where the machine has tiles."""
    return TileState(*_native.tiles())


def cpu_features() -> list[str]:
    """Processor features that kernels care for, as CPUID reports and the operating system allows them."""
    return _native.cpu_features()


class Limit(NamedTuple):
    """A loop of one instruction in registers: its name, its numbers ("int8", "bf16", "fp32"), what it lacks here."""

    name: str
    kind: str
    missing: str


def limits() -> list[Limit]:
    """Every loop of this build; those with nothing missing run here."""
    return [Limit(*one) for one in _native.limits()]


def run_limit(name: str, rounds: int, pool: Pool) -> int:
    """Runs so many rounds of a loop on all threads and returns the multiplications and additions done.

    Divided by the time they took: the most that this processor can do. Raises ValueError for loops that do not run.
    """
    return _native.run_limit(name, rounds, pool._native)


class Place(NamedTuple):
    """Where one thread belongs: its group, the processors it may run on (none: any), the node it prefers memory of."""

    group: int
    cpus: tuple[int, ...] = ()
    node: int | None = None


def places(groups: Sequence[CoreGroup], threads: int, pin: Pin) -> list[Place]:
    """A place for each of `threads` threads, spread over the groups as their cores are.

    "core": a thread owns one physical core; only where there is a core for each. "node": it stays on its node's cores
    and the system moves it there. The first place is the calling thread's, which is pinned in no case.
    """
    if not groups or len(groups) > MAX_GROUPS:
        groups = [CoreGroup(None, tuple(core for group in groups for core in group.cores))]
    crowded = threads > sum(len(group.cores) for group in groups)
    members = [0] * len(groups)
    for _ in range(threads):
        members[min(range(len(groups)), key=lambda g: members[g] / max(1, len(groups[g].cores)))] += 1
    found = []
    for g, (group, count) in enumerate((g, n) for g, n in zip(groups, members, strict=True) if n):
        node = group.node if len(groups) > 1 else None
        whole = tuple(sorted(cpu for core in group.cores for cpu in core))
        for i in range(count):
            own = group.cores[i] if pin == "core" and not crowded else whole
            found.append(Place(g, () if pin == "none" else own, node))
    return found


class Pool:
    """Threads that stay. The thread that calls `forward` is one of them, so `threads=2` starts one more.

    One group of threads a NUMA node: a part of a layer (or an expert, where there is one part) belongs to a group,
    whose threads take it first. Threads of the pool stay on their node's cores and prefer its memory; `pin="core"`
    gives each a core of its own instead (good where nothing else runs, bad where another program does), "none" leaves
    them to the system. The environment's KTPLAN_PIN changes the default. The calling thread is left as it is.
    """

    _default: Pool | None = None

    def __init__(
        self,
        threads: int | None = None,
        *,
        spin_us: int = SPIN_US,
        pin: Pin | None = None,
        groups: Sequence[CoreGroup] | None = None,
    ) -> None:
        """`threads=None`: one a physical core that the process may use (one fewer above four).

        `groups` describes the machine; None reads it. Raises BadUsage for settings that do not exist.
        """
        self._cores = usable_cores()
        self.chosen = (
            Chosen(self._cores.usable, self._cores.why) if threads is None else Chosen(threads, "asked for")
        )
        if not 1 <= self.chosen.value <= 1024:
            raise BadUsage(f"{self.chosen.value} threads asked for", hint="use 1 to 1024")
        self.pin: Pin = _pin(pin)
        self.groups = tuple(core_groups() if groups is None else groups)
        self.places = places(self.groups, self.chosen.value, self.pin)
        self._native = _native.Pool(
            [(p.group, list(p.cpus), -1 if p.node is None else p.node) for p in self.places], spin_us
        )

    @classmethod
    def default(cls) -> Pool:
        """The pool that layers share when none is given; made at the first call."""
        if cls._default is None:
            cls._default = cls()
        return cls._default

    @property
    def threads(self) -> int:
        return self._native.threads

    @property
    def taken(self) -> list[tuple[int, int]]:
        """By thread: pieces of work taken of its own group and of the others', since the pool began."""
        return self._native.taken

    @property
    def affinity(self) -> list[list[int]]:
        """By thread: the processors it may run on; empty for the calling thread and before the first work."""
        return self._native.affinity

    @property
    def troubles(self) -> list[str]:
        """What the system refused to the threads, for people; the work is done all the same."""
        found = []
        if self._native.pin_error:
            found.append(f"threads could not be pinned: {os.strerror(self._native.pin_error)}")
        if self._native.policy_error:
            found.append(
                f"threads could not prefer their node's memory: {os.strerror(self._native.policy_error)}"
            )
        return found


def _pin(wanted: Pin | None) -> Pin:
    name, source = wanted, "asked for"
    if name is None and os.environ.get(PIN_VARIABLE):
        name, source = cast(Pin, os.environ[PIN_VARIABLE]), PIN_VARIABLE
    if name is None:
        return "node"
    if name not in ("core", "node", "none"):
        raise BadUsage(
            f"threads cannot be pinned to {name!r} ({source})", hint="use 'core', 'node' or 'none'"
        )
    return name


class PackedExpert(NamedTuple):
    """One expert's projections in tile order (1-D int8 or uint8), their scales and biases.

    Rows are outputs: gate and up have `intermediate` rows of `hidden` inputs, down the other way round.
    Scales: float32 [N], one a row; with groups bfloat16 bit patterns, uint16 [N / 32, K / group, 32]; None with
    bfloat16 weights. Biases: float32 [N]; None where the model has none.
    """

    gate: npt.NDArray[Any]
    gate_scale: Scales | None
    up: npt.NDArray[Any]
    up_scale: Scales | None
    down: npt.NDArray[Any]
    down_scale: Scales | None
    gate_bias: F32 | None = None
    up_bias: F32 | None = None
    down_bias: F32 | None = None


@dataclass(frozen=True, slots=True)
class Activation:
    """What stands between gate, up and down.

    silu: silu(gate) * up. gelu, gelu-tanh: the error function's and the tanh form's gelu(gate) * up.
    swiglu-oai: gate * sigmoid(alpha * gate) * (up + 1), gpt-oss's. With a limit the gate is at most that and up within
    +-limit first.
    """

    kind: Literal["silu", "gelu", "gelu-tanh", "swiglu-oai"] = "silu"
    alpha: float = 1.702
    limit: float = math.inf


SILU = Activation()


class Pending:
    """A forward pass that other threads compute; `result()` waits for it."""

    def __init__(self, job: _native.Job, out: F32) -> None:
        self._job = job
        self._out = out

    @property
    def done(self) -> bool:
        return self._job.done

    def result(self) -> F32:
        self._job.wait()
        return self._out


class ExpertLayer:
    """The experts of one layer, ready to run.

    `parts[p][e]` is part p of expert e, None for an expert that is not on this device: tokens routed to it get no
    contribution. `intermediate` is the sum over the parts. `bits`: 8, 4, or 16 for bfloat16 weights; `group`: with 4
    bits the inputs that share a scale (32, 64, 128), None where a whole row does. `activation_bits`: 16 keeps
    activations as good as bf16 and better; 8 is faster with many tokens and what kt-kernel does.
    `numerics="upstream"` (with 8 bits) also rounds to bfloat16 where kt-kernel does, to compare with it.

    Outputs are the same bits for every thread count and batch, and with 8 and 4 bits for every instruction set;
    bfloat16 products are summed in each instruction set's own order.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[PackedExpert | None]],
        *,
        hidden: int,
        intermediate: int,
        bits: int,
        group: int | None = None,
        activation: Activation = SILU,
        threads_pool: Pool | None = None,
        isa: str | None = None,
        activation_bits: int = 16,
        numerics: Numerics = "ktplan",
        memory: Memory = "mapped",
    ) -> None:
        """Raises BadUsage for settings that do not exist, BadInput for arrays of other sizes, MachineLacks.

        `memory` is about the weights: "mapped" uses them where they lie and takes no memory of its own; "moved" asks
        the system to move their pages to the nodes of the threads that use them; "copied" puts copies there in huge
        pages, which takes their size once more (`copied_bytes`) and is for systems that map files in small pages.
        """
        if memory not in ("mapped", "moved", "copied"):
            raise BadUsage(f"memory {memory!r} is not known", hint="use 'mapped', 'moved' or 'copied'")
        _check_settings(bits, group, activation_bits, numerics)
        _check_sizes(parts, hidden, intermediate, bits, group)
        self.hidden = hidden
        self.intermediate = intermediate
        self.bits = bits
        self.group = group
        self.activation_bits = activation_bits
        self.numerics = numerics
        self.pool = threads_pool if threads_pool is not None else Pool.default()
        self.isa = _choose(isa)
        self.experts = len(parts[0])
        self.bytes = sum(
            array.nbytes
            for part in parts
            for expert in part
            if expert is not None
            for array in expert
            if array is not None
        )
        packed = [[None if expert is None else tuple(expert) for expert in part] for part in parts]
        self._native = _native.Layer(
            packed,
            hidden,
            bits,
            group or 0,
            self.pool._native,
            self.isa.value,
            activation_bits,
            numerics,
            activation.kind,
            activation.alpha,
            activation.limit,
        )

        self.copied_bytes = self._native.copy() if memory == "copied" else 0
        error = self._native.move() if memory == "moved" else 0
        self.trouble = f"weights could not be moved to their nodes: {os.strerror(error)}" if error else None

    def forward(self, hidden: Any, top_k_index: Any, top_k_weights: Any, out: F32 | None = None) -> F32:
        """The weighted sum of the experts' outputs, float32 [tokens, hidden].

        hidden: [tokens, hidden] float32, or bfloat16 as a torch tensor or as the uint16 bit patterns of a numpy array.
        top_k_index: int64 [tokens, choices]; -1, ids from the expert count on and absent experts contribute nothing.
        top_k_weights: float32 [tokens, choices]. A NaN or an infinity in a token makes that token's output NaN alone.
        Raises ValueError or TypeError, naming the argument, for other dtypes, shapes or orders.
        """
        result = self._output(hidden, out)
        self._native.forward(hidden, top_k_index, top_k_weights, result)
        return result

    def submit(self, hidden: Any, top_k_index: Any, top_k_weights: Any, out: F32 | None = None) -> Pending:
        """As `forward`, but returns at once; the arrays must not change until `result()` of the answer."""
        result = self._output(hidden, out)
        return Pending(self._native.submit(hidden, top_k_index, top_k_weights, result), result)

    def read(self) -> int:
        """Reads all weights once and returns their bytes: maps them into memory, and shows what memory alone costs."""
        return self._native.read()

    def nodes(self) -> dict[int, int]:
        """Pages of weights by NUMA node, of a sample; -1: not in memory. Empty where the system does not tell."""
        found, error = self._native.nodes()
        return {} if error else found

    def _output(self, hidden: Any, out: F32 | None) -> F32:
        if out is not None:
            return out
        shape = getattr(hidden, "shape", (0,))
        return np.empty((shape[0] if shape else 0, self.hidden), np.float32)


def _choose(name: str | None) -> Chosen[str]:
    return isa(name)


def _check_settings(bits: int, group: int | None, activation_bits: int, numerics: str) -> None:
    if bits not in (16, 8, 4):
        raise BadUsage(f"experts of {bits} bits cannot run", hint="16 (bfloat16), 8 and 4 can")
    if group is not None and (bits != 4 or group not in (32, 64, 128)):
        raise BadUsage(
            f"groups of {group} with {bits} bits cannot run", hint="4 bits have groups of 32, 64 or 128"
        )
    if activation_bits not in (8, 16):
        raise BadUsage(f"activations of {activation_bits} bits cannot run", hint="8 and 16 can")
    if numerics not in ("ktplan", "upstream"):
        raise BadUsage(f"numerics {numerics!r} is not known", hint="use 'ktplan' or 'upstream'")
    if numerics == "upstream" and activation_bits != 8:
        raise BadUsage("kt-kernel's numerics have 8-bit activations", hint="pass activation_bits=8")


def _check_sizes(
    parts: Sequence[Sequence[PackedExpert | None]],
    hidden: int,
    intermediate: int,
    bits: int,
    group: int | None,
) -> None:
    if not parts or any(len(part) != len(parts[0]) for part in parts):
        raise BadInput("every part must list the same experts")
    widths = [_part_width(part, p, hidden, bits, group) for p, part in enumerate(parts)]
    present = [width for width in widths if width is not None]
    if present and sum(present) != intermediate:
        raise BadInput(f"the parts are {' + '.join(map(str, present))} wide, not {intermediate} together")


def _part_width(
    part: Sequence[PackedExpert | None], p: int, hidden: int, bits: int, group: int | None
) -> int | None:
    """The intermediate width of a part, all sizes checked against it; None if the part has no expert."""
    width: int | None = None
    for e, expert in enumerate(part):
        if expert is None:
            continue
        if width is None:
            width = expert.gate.size * 8 // (hidden * bits)
        for name, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            expected = {
                name: (rows * columns * bits // 8,),
                f"{name}_scale": (rows,) if group is None else (rows // 32, columns // group, 32),
                f"{name}_bias": (rows,),
            }
            for field_name, shape in expected.items():
                array = getattr(expert, field_name)
                if array is None and (field_name.endswith("_bias") or (bits == 16 and field_name != name)):
                    continue
                if array is None or array.shape != shape:
                    got = "is missing" if array is None else f"has shape {array.shape}"
                    raise BadInput(f"expert {e}, part {p}: {field_name} {got}, expected {shape}")
    return width


def quantize_rows(
    x: F32, bits: int, *, isa: str, numerics: Numerics = "ktplan"
) -> tuple[npt.NDArray[np.int32], F32]:
    """Activations [rows, K] as the kernels see them: integer levels [rows, K] and scales [rows]. For tests."""
    return _native.quantize(isa, x, bits, numerics)


def dot_products(
    x: F32, packed: npt.NDArray[Any], rows: int, bits: int, activation_bits: int, *, isa: str
) -> npt.NDArray[np.int64]:
    """Exact integers levels(x) @ levels(packed).T, [len(x), rows]; INT4 levels are 16 nibbles. For tests."""
    return _native.dots(isa, x, packed, rows, bits, activation_bits)


def project_rows(
    x: F32,
    packed: npt.NDArray[Any],
    scale: Scales | None,
    rows: int,
    bits: int,
    activation_bits: int,
    *,
    isa: str,
    group: int | None = None,
) -> F32:
    """x [T, K] times a packed projection of `rows` outputs, [T, rows], as a layer computes it. For tests."""
    return _native.project(isa, x, packed, scale, rows, bits, group or 0, activation_bits)


def activate(gate: F32, up: F32, *, isa: str, activation: Activation = SILU) -> F32:
    """The activation's value with the kernels' own exponential. For tests."""
    return _native.activate(isa, gate, up, activation.kind, activation.alpha, activation.limit)


def round_bf16(x: F32, *, isa: str) -> F32:
    """The nearest bfloat16 values, ties to even. For tests."""
    return _native.round_bf16(isa, x)


class PackTask(NamedTuple):
    """One projection to quantize and pack, and where its bytes go."""

    matrix: npt.NDArray[Any]  # [N, K], float32 or bfloat16 as uint16; rows may lie apart
    packed: npt.NDArray[np.uint8]  # [N * K * bits / 8]
    # float32 [N]; with groups bfloat16 as uint16, in the order [N / 32][K / group][32]; empty with 16 bits
    scale: npt.NDArray[Any]


class PackOutcome(NamedTuple):
    """`finite`: no NaN, no infinity (else the bytes mean nothing). Sums of squared errors and of squared weights."""

    finite: bool
    error: float
    energy: float


def pack_weights(
    tasks: Sequence[PackTask],
    bits: int,
    rounding: Literal["kt", "mse"],
    multipliers: npt.NDArray[np.uint16],
    *,
    group: int | None = None,
    shares: F32 | None = None,
    pool: Pool | None = None,
    isa: str | None = None,
) -> list[PackOutcome]:
    """Quantize and pack on all threads of `pool`, with the bytes that quant.rounding and quant.groups specify.

    `bits` 16 is bfloat16. `multipliers` is the grid of a row's search (quant.rounding.multipliers), `shares` that of a
    group's (quant.groups.shares). N must be a multiple of 32, K of the layout's unit.
    Raises ValueError or TypeError naming the argument for other shapes and dtypes.
    """
    own = pool if pool is not None else Pool.default()
    found = _native.pack_weights(
        _choose(isa).value,
        own._native,
        [(task.matrix, task.packed, task.scale) for task in tasks],
        bits,
        rounding,
        multipliers,
        group or 0,
        np.empty(0, np.float32) if shares is None else shares,
    )
    return [PackOutcome(*one) for one in found]
