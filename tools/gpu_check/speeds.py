"""Peak speed of known GPUs in dense bf16 matrix products, for the model FLOPs utilisation (MFU).

From NVIDIA's data sheets, without sparsity, in TFLOP/s. The longest entry that is part of a GPU's name applies. A GPU
without an entry has no MFU.
"""

from __future__ import annotations

BF16_TFLOPS = {
    "GB300": 2500.0,  # Blackwell Ultra data sheet, per GPU
    "B300": 2250.0,  # HGX B300 data sheet: 36 PFLOPS sparse for eight
    "GB200": 2500.0,  # GB200 NVL72 data sheet: 360 PFLOPS sparse for 72
    "B200": 2250.0,  # HGX B200 data sheet: 36 PFLOPS sparse for eight
    "H200 NVL": 835.0,  # H200 data sheet
    "H200": 989.0,  # H200 data sheet, SXM
    "GH200": 989.0,  # GH200 data sheet
    "H100 PCIe": 756.0,  # H100 data sheet
    "H100 NVL": 835.0,  # H100 data sheet
    "H100": 989.0,  # H100 data sheet, SXM
    "H800 PCIe": 756.0,  # as H100 PCIe; only links and fp64 differ
    "H800": 989.0,  # as H100; only links and fp64 differ
    "H20": 148.0,  # H20 data sheet
    "A100": 312.0,  # A100 data sheet, all forms
    "A800": 312.0,  # as A100; only links differ
    "L40S": 362.0,  # L40S data sheet
    "RTX 4090": 165.2,  # Ada architecture paper, bf16 with fp32 sums
}


def peak_flops(name: str) -> float | None:
    """TFLOP/s of the GPU with this name; None if unknown."""
    known = [known for known in BF16_TFLOPS if known.lower() in name.lower()]
    return BF16_TFLOPS[max(known, key=len)] if known else None
