"""SecPred (Liu et al. 2020): prediction on shares, with a model that users do not see."""
