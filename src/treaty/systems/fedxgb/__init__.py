"""FedXGB (Liu et al. 2020): users, edge servers and a server that owns the model."""
