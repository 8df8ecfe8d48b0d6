"""SecureBoost (Cheng et al. 2019): boosting by column on encrypted gradients."""
