# What a newcomer types before there are two organisations. Lines that begin with "# %%" are headings of the tutorial.

# %% install
python3 -m venv .venv
. .venv/bin/activate
pip install '.[xgboost,report]'
treaty --version

# %% demo
treaty demo --report out.html

# %% tables
mkdir -p first
cd first
python ../examples/customers.py

# %% job
cp ../../examples/first_steps/job.toml .
