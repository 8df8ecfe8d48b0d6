# What the bank types, in its folder. Lines that begin with "# %%" are headings of the tutorial.

# %% keys
treaty keys new bank --folder .

# %% exchange
cp ../shop/shop.cert.pem .

# %% check
treaty check job.toml --as bank --wait 5m

# %% train
treaty train job.toml --as bank

# %% show
treaty show model/bank.part

# %% predict
treaty predict job.toml --as bank
head -n 3 model/predictions.csv

# %% report
treaty report model --predictions model/predictions.csv --labels later.csv --label defaulted --output report.html

# %% audit
treaty audit seen/bank.record ../shop/seen/shop.record
