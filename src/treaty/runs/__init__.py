"""Running a job: in threads, in processes, or as one party of it."""
