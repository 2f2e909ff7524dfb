"""What a results file says about the machine: versions, clock, and two bandwidth limits measured in the same run."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks import timing
from benchmarks.sources import fingerprint

CALLS = 8  # of a copy between two events, so that their latency does not show
BUFFER_BYTES = {"cuda": 1 << 32, "cpu": 1 << 28}  # far beyond every cache


def describe(device: torch.device) -> dict:
    """The `meta` of a results file."""
    cuda = device.type == "cuda"
    copy_gb_s, read_gb_s, clock = measure_limits(device)
    return {
        "gpu": torch.cuda.get_device_name(device) if cuda else "",
        "gpu_count": torch.cuda.device_count(),
        "cpu": cpu_name(),
        "driver": nvidia_smi("driver_version") if cuda else "",
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "triton": version("triton"),
        "liger": version("liger-kernel"),
        "python": platform.python_version(),
        "sm_clock_mhz": clock,
        "copy_gb_s": round(copy_gb_s, 1),
        "read_gb_s": round(read_gb_s, 1),
        "sources": fingerprint(),
        "command": command(),
        "date": now(),
    }


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def measure_limits(device: torch.device) -> tuple[float, float, int]:
    """Bandwidth of a copy (bytes read plus written) and of a read in GB/s, and the SM clock in MHz under that load."""
    size = BUFFER_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    words = size // 2**15 * 2**13  # whole blocks of `read`
    source = torch.randint(2**30, (words,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copy_us = typical_time(lambda: target.copy_(source), device)
    read_us = min(typical_time(read, device) for read in readers(source))
    clock = 0
    if device.type == "cuda":
        for _ in range(500):  # a second of work, so that the clock is read under load
            target.copy_(source)
        reading = nvidia_smi("clocks.sm")
        clock = int(reading) if reading.isdigit() else 0
    timing.synchronize(device)
    return 2 * source.nbytes / copy_us / 1e3, source.nbytes / read_us / 1e3, clock


def readers(source: torch.Tensor):
    yield lambda: source.view(torch.float32).amax()
    if source.device.type == "cuda":
        from benchmarks.triton_kernels import read

        sums = torch.empty(source.numel() // 8192, dtype=torch.int32, device=source.device)
        yield lambda: read(source, sums)


def typical_time(call, device: torch.device) -> float:
    """Median microseconds of `call` once warm."""
    samples = []
    for _ in range(20 if device.type == "cuda" else 5):
        if device.type == "cuda":
            start, end = timing.between_events(lambda: [call() for _ in range(CALLS)])
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / CALLS)
        else:
            begin = time.perf_counter()
            call()
            samples.append((time.perf_counter() - begin) * 1e6)
    return timing.summary(samples[len(samples) // 4 :])["time_us"]


def nvidia_smi(field: str) -> str:
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return ""
    return lines[0].strip() if lines else ""


def command() -> str:
    """The command line, without the places on this machine that it names."""
    words, arguments = ["python -m benchmarks"], iter(sys.argv[1:])
    for argument in arguments:
        if argument == "--output":
            next(arguments, None)
        elif not argument.startswith("--output="):
            words.append(os.path.basename(argument) if os.path.exists(argument) else argument)
    return " ".join(words)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {os.cpu_count()} threads" if names else platform.processor()
