"""Machines one does not own: a small table of devices, and descriptions like "RTX 4090 24GiB, 2x Xeon 8x DDR5-4800".

Figures are nominal; each row says where its memory and bandwidth were read and when. Products (dense, half precision
with float32 sums) are twice the published FP32 rate for GeForce cards and four times for workstation cards, as the
makers' architecture papers have it, and as published for data-centre cards. PCIe: generation 4 has 31.5 GB/s one way on
16 lanes, generation 5 twice that. DDR: transfers a second x 8 bytes a channel (JEDEC). What a program reaches of them
is below; the shares used are stated with each figure, and the spread is wide.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ktplan.errors import BadUsage
from ktplan.placement.machine import Figure, GpuSpec, HardwareSpec
from ktplan.units import parse_bytes

_SPREAD: Final = 0.15  # of what programs reach of nominal figures, from run to run and kernel to kernel
_REACHED_GPU: Final = 0.80  # share of a GPU's memory bandwidth that matrix-vector kernels reach
_REACHED_CPU: Final = (
    0.70  # share of DDR bandwidth; 212 GB/s of 2 x 307 GB/s was fitted across sockets for one machine
)
_REACHED_PCIE: Final = 0.80
HOP_S: Final = (
    45e-6  # fitted to the published Qwen3-Next table: stream fork, wake-up, two small copies, merge
)
LAUNCH_S: Final = 4e-6


class Source(NamedTuple):
    """Where a row was read, and when."""

    url: str
    date: str  # ISO 8601


class Gpu(NamedTuple):
    """Nominal figures: GiB, GB/s, dense half-precision TFLOPS, PCIe GB/s one way."""

    memory: int
    bandwidth: float
    tflops: float
    pcie: float
    source: Source


class Cpu(NamedTuple):
    """Memory channels of a socket, and dense TFLOPS of expert products (ours: a typical processor of the line)."""

    channels: int
    tflops: float
    source: Source


_SEEN: Final = "2026-11-30"
_LIST: Final = Source(
    "https://github.com/CYBIRD-D/How-to-Choose-your-LLM-Model-for-translation/blob/main/Nvidia_GPU_Specification.md",
    _SEEN,
)
_RTX6000: Final = Source(
    "https://www.yottalabs.ai/post/which-nvidia-rtx-6000-gpu-is-right-for-you-in-2026", _SEEN
)
_HOPPER: Final = Source("https://acecloud.ai/blog/nvidia-b200-vs-h200-h100-a100", _SEEN)

GPUS: Final[dict[str, Gpu]] = {
    "RTX 3060": Gpu(12, 360, 25.5, 31.5, _LIST),
    "RTX 3090": Gpu(24, 936, 71, 31.5, _LIST),
    "RTX 4060 TI": Gpu(16, 288, 44, 15.8, _LIST),  # eight lanes
    "RTX 4070 TI SUPER": Gpu(16, 672, 88, 31.5, _LIST),
    "RTX 4080": Gpu(16, 717, 97.5, 31.5, _LIST),
    "RTX 4090": Gpu(
        24, 1008, 165, 31.5, Source("https://waredb.com/processor/nvidia-geforce-rtx-4090", _SEEN)
    ),
    "RTX 5070 TI": Gpu(16, 896, 88, 63, _LIST),
    "RTX 5080": Gpu(16, 960, 113, 63, _LIST),
    "RTX 5090": Gpu(
        32, 1792, 210, 63, Source("https://www.spheron.network/blog/nvidia-rtx-5090-specs/", _SEEN)
    ),
    "RTX A6000": Gpu(
        48,
        768,
        155,
        31.5,
        Source("https://servethehome.com/nvidia-rtx-a6000-48gb-gpu-drops-quadro-designation", _SEEN),
    ),
    "RTX 6000 ADA": Gpu(48, 960, 364, 31.5, _RTX6000),
    "RTX PRO 6000": Gpu(96, 1792, 504, 63, _RTX6000),
    "L40S": Gpu(48, 864, 362, 31.5, Source("https://www.mullet.se/product.html?product_id=355414", _SEEN)),
    "A100": Gpu(80, 2039, 312, 31.5, Source("https://glennklockwood.com/garden/processors/A100", _SEEN)),
    "H100": Gpu(80, 3350, 989, 63, _HOPPER),
    "H200": Gpu(140, 4800, 989, 63, _HOPPER),
}
# Products: AMX where the processor has it, else AVX-512 or AVX2.
CPUS: Final[dict[str, Cpu]] = {
    "XEON": Cpu(
        8,
        15.0,
        Source(
            "https://www.sweclockers.com/nyhet/35696-intel-kontrar-amd-ryzen-threadripper-med-sapphire-rapids-och-56-karnor",
            _SEEN,
        ),
    ),
    "EPYC": Cpu(
        12,
        4.0,
        Source("https://www.tomshardware.com/news/amd-confirms-12-ddr5-memory-channels-on-genoa", _SEEN),
    ),
    "THREADRIPPER": Cpu(
        4,
        2.5,
        Source(
            "https://www.tomshw.it/hardware/amd-tr5-arrivera-nella-seconda-meta-del-2023-secondo-asus/", _SEEN
        ),
    ),
    "RYZEN": Cpu(2, 1.0, Source("https://dimonvideo.ru/usernews/205657", _SEEN)),
    "CORE": Cpu(2, 0.8, Source("https://dimonvideo.ru/usernews/205657", _SEEN)),
}


def describe(text: str) -> HardwareSpec:
    """A machine from words: parts apart by commas, GPUs as `[Nx] NAME [MEMORY]`, CPUs as `[Nx] NAME [CHANNELSx]
    DDR5-MTS [RAM]`. Raises BadUsage naming the part that is not understood and what is known."""
    gpus: list[GpuSpec] = []
    nodes: list[Figure] = []
    flops, memory = 0.0, 0
    for part in filter(None, (word.strip() for word in text.split(","))):
        count, rest = _count(part)
        cpu = next((name for name in CPUS if name in rest.upper().split()), None) or next(
            (name for name in CPUS if re.search(rf"\b{name}\b", rest.upper())), None
        )
        if cpu is not None or "DDR" in rest.upper():
            bandwidth = _cpu_bandwidth(part, rest, cpu)
            nodes += [bandwidth] * count
            flops += count * CPUS[cpu or "CORE"].tflops * 1e12
            memory += _memory(rest, 0)
        else:
            gpus += [_gpu(part, rest)] * count
    if not nodes:
        raise BadUsage(
            f"'{text}' names no CPU", hint='write it like "RTX 4090 24GiB, 2x Xeon 8x DDR5-4800 512GiB"'
        )
    return HardwareSpec(
        name=text,
        cpu_bandwidth=tuple(nodes),
        cpu_flops=Figure.given(flops, "typical of the processor", 0.4),
        memory=memory,
        hop=Figure.given(HOP_S, "fitted to published runs of KTransformers", 0.25),
        gpus=tuple(gpus),
        notes=(
            f"figures are nominal, as published (read {_SEEN}), not measured: expect a quarter more or less",
        ),
    )


def reference() -> HardwareSpec:
    """The machine of KTransformers' published placement table, as fitted to it: used where no machine is named."""
    machine = describe("4x RTX 4090 24GiB, 1x Xeon 8x DDR5-4800 512GiB")
    return HardwareSpec(
        name="reference machine (4x RTX 4090, Xeon Gold 6454S; fitted to KTransformers' published table)",
        cpu_bandwidth=(Figure.given(212e9, "fitted: 14.8 us for an expert of 3.15 MB", 0.08),),
        cpu_flops=machine.cpu_flops,
        memory=machine.memory,
        hop=Figure.given(HOP_S, "fitted", 0.2),
        gpus=machine.gpus,
        notes=("no machine was named; figures are those of another one",),
    )


def _count(part: str) -> tuple[int, str]:
    found = re.match(r"(\d+)\s*[xX]\s+(.*)", part)
    return (int(found.group(1)), found.group(2)) if found else (1, part)


def _gpu(part: str, rest: str) -> GpuSpec:
    name = re.sub(r"\d+(\.\d+)?\s*(GiB|GB|G)\b", "", rest, flags=re.IGNORECASE).strip()
    known = re.sub(r"\s+", " ", name.upper().replace("NVIDIA", "").replace("GEFORCE", "")).strip()
    sheet = GPUS.get(known) or next(
        (GPUS[key] for key in sorted(GPUS, key=len, reverse=True) if key in known), None
    )
    if sheet is None:
        raise BadUsage(f"'{part}' is no known GPU or CPU", hint=f"known are {', '.join([*GPUS, *CPUS])}")
    return GpuSpec(
        name=name,
        memory=_memory(rest, sheet.memory << 30),
        bandwidth=_reached(sheet.bandwidth * 1e9, _REACHED_GPU, sheet.source),
        copy=_reached(sheet.pcie * 1e9, _REACHED_PCIE, sheet.source),
        launch=Figure.given(LAUNCH_S, "typical of CUDA", 0.25),
        flops=_reached(sheet.tflops * 1e12, 0.5, sheet.source),
    )


def _cpu_bandwidth(part: str, rest: str, cpu: str | None) -> Figure:
    found = re.search(r"(?:(\d+)\s*[xX]\s*)?DDR[45]-?(\d{4,5})", rest, flags=re.IGNORECASE)
    if found is None:
        raise BadUsage(
            f"'{part}' says no memory",
            hint="write it like '2x Xeon 8x DDR5-4800': channels of a socket, speed",
        )
    channels = int(found.group(1)) if found.group(1) else CPUS[cpu or "CORE"].channels
    return _reached(channels * int(found.group(2)) * 1e6 * 8, _REACHED_CPU)


def _memory(text: str, default: int) -> int:
    found = re.search(r"\b(\d+(?:\.\d+)?\s*(?:[KMGT]i?B|[GT]))\b", text, flags=re.IGNORECASE)
    return parse_bytes(found.group(1)) if found else default


def _reached(sheet: float, share: float, source: Source | None = None) -> Figure:
    where = f", {source.url} as of {source.date}" if source else " (channels x transfers x 8 bytes)"
    return Figure.given(sheet * share, f"{share:.0%} of nominal{where}", _SPREAD)
