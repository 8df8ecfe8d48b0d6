"""FedXGBoost-LDP (Le et al. 2021): passive parties choose splits on noisy gradients."""
