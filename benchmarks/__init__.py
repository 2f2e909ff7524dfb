"""Benchmarks of llmkernels beside its peers: `python -m benchmarks ops|model|decode|train|stale|merge|show`.

sections.py        the table of sections: what is measured at once; sources.py: on which files it depends
measure.py         the sections of an op: every case by every provider
call_overhead.py   the CPU cost of one Python call
forward*.py        prefill and decode by a user's own loop over the forward of a model, and its variants.py
steps*.py          what generate takes per token, patched and not in turn; step_parts.py: the launches of a step
host.py            what a forward of a patched model takes on the host beside the kernels of its step
adapters.py        a model with low-rank adapters
harnesses.py       pipelines, chats in threads, continuous batching, a server, lm-evaluation-harness, TRL
families.py        models of many families: every way to generate, and the first token
training*.py       a step of fine-tuning, and its losses: of random weights, and of the real model
models.py          the models that are measured
cases.py, ops/     what the benchmark of one op consists of: its cases, its inputs, its implementations
triton_kernels.py  short Triton kernels of ours, for a head to head with CUDA C++
timing.py          the timer: CUDA graphs over rotated inputs, single launches, wall time
results.py         results files, into which sections are merged; machine.py: what goes into their `meta`
report.py          tables on the terminal and progress
plots.py           the pictures and tables.py the tables of the documents, from the results files alone
references.py      numbers of other runs in the pictures
"""
