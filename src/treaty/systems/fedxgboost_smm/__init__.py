"""FedXGBoost-SMM (Le et al. 2021): split sums by secure matrix multiplication."""
