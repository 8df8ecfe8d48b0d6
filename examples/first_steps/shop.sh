# What the shop types, in its folder. Lines that begin with "# %%" are headings of the tutorial.

# %% keys
treaty keys new shop --folder .

# %% exchange
cp ../bank/bank.cert.pem .

# %% check
treaty check job.toml --as shop --wait 5m

# %% train
treaty train job.toml --as shop

# %% show
treaty show model/shop.part

# %% predict
treaty predict job.toml --as shop
