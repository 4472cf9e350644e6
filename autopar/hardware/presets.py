"""Presets of devices, nodes and networks, with the sources of their figures.

Peak rates are those without sparsity, and of float32 without TF32, as torch's default. `efficiency`: the share of the
peak that large half-precision products reach. Where nothing else was measured, pointwise kernels are taken to reach
90 % of the peak memory bandwidth. `memory_bytes`: the total of `torch.cuda.mem_get_info`, less a CUDA context of about
0.5 GiB.

==============  =====================================================================================================
a100-40, -80    NVIDIA A100 datasheet (SXM): 312 TFLOP/s bf16, 19.5 fp32 and fp64; 1555 and 2039 GB/s; 108 SMs;
                NVLink 3, 300 GB/s one way; DGX A100: 8 cards of 200 Gb/s
a800-80         the same with NVLink at 200 GB/s one way
h100-80         NVIDIA H100 datasheet (SXM5): 989 TFLOP/s bf16, 67 fp32 and fp64; 3350 GB/s; 132 SMs; NVLink 4,
                450 GB/s one way; DGX H100: 8 cards of 400 Gb/s. What attention, pointwise kernels and the optimizer
                reach: measured on one with torch 2.11 (docs/results/one_gpu.md)
h100-80-pcie    the same datasheet (PCIe): 756 TFLOP/s bf16, 51 fp32 and fp64; 2000 GB/s; 114 SMs; PCIe 5 x16
h200            NVIDIA H200 datasheet (SXM): as h100-80 with 4800 GB/s, and the same parts of it
b200            NVIDIA DGX B200 datasheet, an eighth: 2250 TFLOP/s bf16, 75 fp32, 37 fp64; 8000 GB/s; 148 SMs;
                NVLink 5, 900 GB/s one way; 8 cards of 400 Gb/s
mi300x          AMD Instinct MI300X datasheet: 1307 TFLOP/s bf16, 163 fp32 and fp64 (matrix); 5300 GB/s; 304 CUs;
                7 links of 64 GB/s one way, one to each peer; 8 cards of 400 Gb/s
v100-16, -32    NVIDIA V100 datasheet (SXM2): 125 TFLOP/s fp16, 15.7 fp32, 7.8 fp64, no bf16 units; 900 GB/s; 80 SMs;
                NVLink 2, 150 GB/s one way; 16 GB as in AWS p3.16xlarge (25 Gb/s Ethernet), 32 GB as in DGX-1
                (4 cards of 100 Gb/s)
cpu             one core of a current x86 server for each process, all on one host, with gloo over the loopback: a rough
                substitute for a measurement (`autopar profile`)
==============  =====================================================================================================

Inside a node an axis reaches 70 to 75 % of the links' one-way rate, as large all-reduces of nccl-tests do; less over
PCIe. Between nodes it reaches 90 % of the cards' line rate. Latencies of hops are those of NCCL's Simple protocol
(constants of its tuning.cc). The launch time is that of small collectives in the one-node tables that Hetu-Galvatron
publishes.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import InputError
from autopar.hardware.devices import Device, Node

GIB = 1024**3
COLLECTIVE_PROCESSORS = 16
"""Processors of a GPU that a running collective occupies: one thread block for each of NCCL's channels in a node."""


def gpu_overlap(processors: int) -> float:
    """The share of its rate that compute keeps while a collective runs: the share of processors left to it.

    >>> round(gpu_overlap(108), 2)
    0.85
    """
    return max(0.0, 1 - COLLECTIVE_PROCESSORS / processors)


def _gpu(
    name: str,
    gib: float,
    half: float,
    single: float,
    double: float,
    gb_per_s: float,
    processors: int,
    *,
    efficiency: float,
    attention: float,
    pointwise: float = 0.9,
    update: float | None = None,
    brain: float | None = None,
) -> Device:
    """A GPU with rates in TFLOP/s: `half`, `single` and `double`, and `brain` if bfloat16 differs from float16.
    `pointwise`, `update`: the shares of peak memory bandwidth that pointwise kernels and the optimizer reach (`update`
    None: that of pointwise kernels)."""
    tera = {"bfloat16": brain or half, "float16": half, "float32": single, "float64": double}
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=int(gib * GIB),
        flops_per_s={dtype: rate * 1e12 for dtype, rate in tera.items()},
        bytes_per_s=pointwise * gb_per_s * 1e9,
        efficiency=efficiency,
        processors=processors,
        overlap=gpu_overlap(processors),
        attention=attention,
        update_bytes_per_s=None if update is None else update * gb_per_s * 1e9,
    )


_A100 = _gpu("a100-80", 78.5, 312, 19.5, 19.5, 2039, 108, efficiency=0.8, attention=0.7)
_HOPPER = {"efficiency": 0.7, "attention": 0.45, "pointwise": 0.68, "update": 0.76}  # see h100-80 above
_H100 = _gpu("h100-80", 78.5, 989, 67, 67, 3350, 132, **_HOPPER)

NETWORKS: dict[str, tuple[float, float]] = {
    "xdr": (100e9, 1e-5),
    "ndr": (50e9, 1e-5),
    "hdr": (25e9, 1e-5),
    "edr": (12.5e9, 1e-5),
    "roce400": (50e9, 1.2e-5),
    "roce200": (25e9, 1.2e-5),
    "roce100": (12.5e9, 1.2e-5),
    "ethernet100": (12.5e9, 4e-5),
    "ethernet25": (3.125e9, 4e-5),
    "ethernet10": (1.25e9, 4e-5),
}
"""Network cards by name: line rate of one card (bytes/s, one way) and seconds of a hop. InfiniBand by generation, RoCE
with GPUDirect RDMA, Ethernet through TCP sockets; numbers in names are Gb/s."""


def network(text: str) -> tuple[float, float]:
    """Effective bytes/s (one way) of all cards of a node, and seconds of a hop: "8xhdr", "4xroce100", "ethernet25".

    >>> network("8xhdr")
    (180000000000.0, 1e-05)
    """
    if not isinstance(text, str):
        raise InputError(f"network {text!r} is no text: write the cards of a node as in '8xhdr'")
    count, _, name = text.partition("x") if text[:1].isdigit() else ("1", "x", text)
    if name not in NETWORKS or not count.isdigit() or int(count) < 1:
        names = ", ".join(NETWORKS)
        raise InputError(f"network {text!r} is unknown: write the cards of a node as in '8xhdr', with one of {names}")
    line_bytes_per_s, latency = NETWORKS[name]
    return int(count) * 0.9 * line_bytes_per_s, latency


def _node(bytes_per_s: float, cards: str, latency: float = 4e-6, devices: int = 8) -> Node:
    return Node(devices, bytes_per_s, latency, *network(cards), launch_seconds=4e-5, low_latency=True)


PRESETS: dict[str, tuple[Device, Node]] = {
    "a100-80": (_A100, _node(210e9, "8xhdr")),
    "a100-40": (
        _gpu("a100-40", 38.9, 312, 19.5, 19.5, 1555, 108, efficiency=0.8, attention=0.7),
        _node(210e9, "8xhdr"),
    ),
    "a800-80": (replace(_A100, name="a800-80"), _node(150e9, "8xhdr")),
    "h100-80": (_H100, _node(340e9, "8xndr")),
    "h100-80-pcie": (
        _gpu("h100-80-pcie", 78.5, 756, 51, 51, 2000, 114, efficiency=0.65, attention=0.6),
        _node(40e9, "2xndr", 5.7e-6),
    ),
    "h200": (_gpu("h200", 139.0, 989, 67, 67, 4800, 132, **_HOPPER), _node(340e9, "8xndr")),
    "b200": (_gpu("b200", 177.5, 2250, 75, 37, 8000, 148, efficiency=0.7, attention=0.6), _node(675e9, "8xndr")),
    "mi300x": (
        _gpu("mi300x", 191.0, 1307, 163, 163, 5300, 304, efficiency=0.5, attention=0.6),
        _node(310e9, "8xroce400"),
    ),
    "v100-16": (
        _gpu("v100-16", 15.2, 125, 15.7, 7.8, 900, 80, efficiency=0.75, attention=0.5, brain=15.7),
        _node(110e9, "ethernet25"),
    ),
    "v100-32": (
        _gpu("v100-32", 31.2, 125, 15.7, 7.8, 900, 80, efficiency=0.75, attention=0.5, brain=15.7),
        _node(110e9, "4xedr"),
    ),
    "cpu": (
        Device(
            name="cpu",
            kind="cpu",
            memory_bytes=16 * GIB,
            flops_per_s={"float32": 1e11, "float64": 5e10, "bfloat16": 5e10, "float16": 1e10},
            bytes_per_s=1e10,
            efficiency=0.8,
            launch_seconds=1e-5,
        ),
        Node(1 << 30, 1e9, 1e-4, 1e9, 1e-4, launch_seconds=1e-4),
    ),
}
ALIASES = {"a100": "a100-80", "a800": "a800-80", "h100": "h100-80", "v100": "v100-16"}

BY_DEVICE_NAME = {
    "A100-SXM4-80GB": "a100-80",
    "A100-SXM4-40GB": "a100-40",
    "A800-SXM4-80GB": "a800-80",
    "H100 80GB HBM3": "h100-80",
    "H100 PCIe": "h100-80-pcie",
    "H200": "h200",
    "B200": "b200",
    "MI300X": "mi300x",
    "V100-SXM2-16GB": "v100-16",
    "V100-SXM2-32GB": "v100-32",
}
"""Presets by a substring of `torch.cuda.get_device_name`. (An H200 NVL or an A100 PCIe has other links: no preset.)"""


def preset_of_device_name(name: str) -> str | None:
    """The preset of a device with this name, or None.

    >>> preset_of_device_name("NVIDIA H100 80GB HBM3"), preset_of_device_name("NVIDIA H200 NVL")
    ('h100-80', None)
    """
    return next((p for pattern, p in BY_DEVICE_NAME.items() if pattern in name and "NVL" not in name), None)
