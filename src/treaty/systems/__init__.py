"""One folder per published system: its options, its roles as programs, and what each role learns."""
