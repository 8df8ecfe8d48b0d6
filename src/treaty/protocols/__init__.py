"""One file per published system: its roles as programs that read like the paper's listing."""
