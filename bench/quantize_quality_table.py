#!/usr/bin/env python3
"""Makes the table of docs/benchmarks.md from the JSON of bench/quantize_quality.py; a test compares them.

bench/quantize_quality_table.py bench/results/quantize-quality-cpu-ac116c0.json
"""

import json
import sys

COLUMNS = (("weight_sqnr_db", "{:.2f}"), ("output_snr_db", "{:.2f}"))


def line(cells):
    return "| " + " | ".join(cells) + " |"


def table(bench):
    weights = list(dict.fromkeys(row["weights"] for row in bench["results"]))
    found = {(row["method"], row["weights"]): row for row in bench["results"]}
    names = [name.replace("_", " ") for name in weights]
    lines = [line(["weights / output, dB", *names, "GB/s"]), line(["---"] + ["---:"] * (len(weights) + 1))]
    for method in dict.fromkeys(row["method"] for row in bench["results"]):
        rows = [found[method, name] for name in weights]
        cells = [" / ".join(form.format(row[key]) for key, form in COLUMNS) for row in rows]
        # The fastest of all runs, because other load on the machine only slows them down.
        lines.append(line([method, *cells, f"{max(row['gb_per_s'] for row in rows):.2g}"]))
    return "\n".join(lines)


def main():
    with open(sys.argv[1]) as file:
        print(table(json.load(file)))


if __name__ == "__main__":
    main()
