"""What a run says: latencies, throughput, goodput, and an interval for each figure."""
