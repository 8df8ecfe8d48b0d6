# What the bank types, in its folder. Lines that begin with "# %%" are headings of the page.

# %% keys
treaty keys new bank --folder .

# %% exchange
cp ../bureau/bureau.cert.pem .

# %% train
treaty train job.toml --as bank

# %% sign
treaty scorecard model/bank.part --edition 2026.1 --sign . \
    --partner ../bureau/card.json --certificate bureau.cert.pem --output card.html

# %% predict
treaty predict job.toml --as bank
head -n 3 model/predictions.csv

# %% reasons
treaty scorecard model/bank.part --rows applicants.csv --id ID --most 2
head -n 3 reasons.csv
