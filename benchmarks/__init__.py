"""Benchmarks of llmkernels beside its peers: `python -m benchmarks ops | model | decode | plot`.

cases.py           what the benchmark of one op consists of
ops/               one entry per op: its cases, its inputs, its implementations
triton_kernels.py  short Triton kernels of ours, for a head to head with CUDA C++
timing.py          the timer: CUDA graphs over rotated inputs, single launches, wall time
run_ops.py         `ops`: every case by every provider
call_overhead.py   part of `ops`: the CPU cost of one Python call
run_model.py       `model`: prefill and decode of a live Hugging Face model
run_decode.py      `decode`: the kernels of a decode step, and whole steps of a model
variants.py        the model as it is, patched by llmkernels, patched by Liger, compiled
report.py          results files, tables and progress; machine.py: what goes into their `meta`
plots.py           the pictures, drawn from the results files alone; references.py: numbers of other runs in them
"""
