"""FederBoost by column (Tian et al. 2020): training on noisy buckets sent once."""
