# What the bureau types, in its folder. Lines that begin with "# %%" are headings of the page.

# %% keys
treaty keys new bureau --folder .

# %% exchange
cp ../bank/bank.cert.pem .

# %% train
treaty train job.toml --as bureau

# %% card
treaty scorecard model/bureau.part

# %% export
treaty scorecard model/bureau.part --edition 2026.1 --sign . --output card.json

# %% predict
treaty predict job.toml --as bureau

# %% reasons
treaty scorecard model/bureau.part --rows applicants.csv --id ID --most 2
