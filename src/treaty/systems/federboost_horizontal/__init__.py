"""FederBoost by row (Tian et al. 2020): training on securely summed histograms."""
