# Typed where both organisations are played on one machine. Lines that begin with "# %%" are headings of the page.

# %% tables
python make_tables.py credit.parquet

# %% job
cp job.toml bank/
cp job.toml bureau/

# %% compare
python compare.py
