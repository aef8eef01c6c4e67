"""The figures of a run: latencies, throughput, goodput, and an interval for each figure."""
