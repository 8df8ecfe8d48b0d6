"""The machine a party runs on: kernels, threads, arrays on disk, databases, and the process itself."""
