"""A pool shared with other sidecars: which regions are ours to write, what we publish, what we read of theirs."""
