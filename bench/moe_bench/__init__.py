"""Checks and times one mixture-of-experts layer on one GPU: this library and the NVFP4 layers of other libraries.

    python3 -m bench.moe_bench --json out.json          # from the repository's root, the module built or installed

docs/benchmarks.md describes the protocol and has the results. `shapes` lists the layers, `workload` draws weights,
hidden states and routings, `reference` is the layer in fp32, `roofline` the floor, `timing` the clock, `layers` has one
file per library, `record` reads what a run wrote, `table` and `plot` show it.
"""
