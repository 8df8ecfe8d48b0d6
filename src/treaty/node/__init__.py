"""A node: an organisation's long-running process, with its keys, data sets, policies and jobs."""
